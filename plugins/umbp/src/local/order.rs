//! Order of use: a list through slots.

const NONE: u32 = u32::MAX;

#[derive(Debug, Clone, Copy)]
struct Link {
    newer: u32,
    older: u32,
    listed: bool,
}

/// Slots by their last use.
#[derive(Debug)]
pub struct Order {
    links: Vec<Link>,
    newest: u32,
    oldest: u32,
    len: usize,
}

impl Default for Order {
    fn default() -> Order {
        Order { links: Vec::new(), newest: NONE, oldest: NONE, len: 0 }
    }
}

impl Order {
    /// Slots in the list.
    pub fn len(&self) -> usize {
        self.len
    }

    /// The slot was used now; it joins the list if it was not there.
    pub fn touch(&mut self, slot: u32) {
        self.remove(slot);
        if self.links.len() <= slot as usize {
            self.links.resize(slot as usize + 1, Link { newer: NONE, older: NONE, listed: false });
        }
        let older = self.newest;
        if let Some(link) = self.links.get_mut(slot as usize) {
            *link = Link { newer: NONE, older, listed: true };
        }
        match self.links.get_mut(older as usize) {
            Some(link) => link.newer = slot,
            None => self.oldest = slot,
        }
        self.newest = slot;
        self.len += 1;
    }

    /// The slot leaves the list.
    pub fn remove(&mut self, slot: u32) {
        let Some(link) = self.links.get_mut(slot as usize).filter(|link| link.listed) else { return };
        link.listed = false;
        let Link { newer, older, .. } = *link;
        match self.links.get_mut(newer as usize) {
            Some(link) => link.older = older,
            None => self.newest = older,
        }
        match self.links.get_mut(older as usize) {
            Some(link) => link.newer = newer,
            None => self.oldest = newer,
        }
        self.len -= 1;
    }

    /// From the one used longest ago on.
    pub fn oldest_first(&self) -> impl Iterator<Item = u32> + '_ {
        let mut at = self.oldest;
        std::iter::from_fn(move || {
            let link = self.links.get(at as usize)?;
            let slot = at;
            at = link.newer;
            Some(slot)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_used_last_comes_last() {
        let mut order = Order::default();
        for slot in [3, 1, 4, 1, 5, 9, 2, 6] {
            order.touch(slot);
        }
        order.remove(5);
        order.remove(5);
        assert_eq!(order.oldest_first().collect::<Vec<_>>(), [3, 4, 1, 9, 2, 6]);
        order.touch(3);
        order.remove(4);
        order.remove(6);
        assert_eq!(order.oldest_first().collect::<Vec<_>>(), [1, 9, 2, 3]);
        assert_eq!(order.len(), 4);
    }
}
