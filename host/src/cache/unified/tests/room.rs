//! Slots from pools and tree together.

use std::collections::BTreeSet;

use super::*;

/// Pools of numbers.
#[derive(Default)]
struct Numbers {
    free: PerComponent<BTreeSet<u32>>,
    returned: Vec<Component>,
}

impl Numbers {
    fn new(counts: [u32; 3]) -> Self {
        Numbers { free: PerComponent(counts.map(|count| (0..count).collect())), returned: Vec::new() }
    }
}

impl Numbers {
    fn free(&self, component: Component) -> usize {
        self.free[component].len()
    }
}

/// A tree over pools of numbers.
struct Memory {
    tree: Tree,
    device: Numbers,
    host: Numbers,
    copies_work: bool,
    copied: usize,
}

impl Memory {
    fn pools(&mut self, side: Side) -> &mut Numbers {
        match side {
            Side::Device => &mut self.device,
            Side::Host => &mut self.host,
        }
    }
}

impl Room for Memory {
    fn tree(&mut self) -> &mut Tree {
        &mut self.tree
    }

    fn free_slots(&self, side: Side, component: Component) -> Option<usize> {
        Some(match side {
            Side::Device => self.device.free(component),
            Side::Host => self.host.free(component),
        })
    }

    fn take(&mut self, side: Side, component: Component, count: usize) -> Option<Vec<u32>> {
        let free = &mut self.pools(side).free[component];
        (free.len() >= count).then(|| (0..count).filter_map(|_| free.pop_first()).collect())
    }

    fn give_back(&mut self, side: Side, component: Component, slots: &[u32]) {
        let pools = self.pools(side);
        pools.returned.push(component);
        for &slot in slots {
            assert!(pools.free[component].insert(slot), "slot {slot} of {component:?} was free");
        }
    }

    fn copy_down(&mut self, _: Component, device: &[u32], host: &[u32]) -> bool {
        assert_eq!(device.len(), host.len());
        self.copied += device.len();
        self.copies_work
    }

    fn carry_out(&mut self, actions: Actions) {
        for action in actions.0 {
            match action {
                Action::FreeDevice { component, slots } => self.give_back(Side::Device, component, &slots),
                Action::FreeHost { component, slots } => self.give_back(Side::Host, component, &slots),
                Action::LeftDevice { .. } | Action::Dropped { .. } | Action::LeftHost { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }
}

fn memory(device: [u32; 3], host: [u32; 3], change: impl FnOnce(&mut TreeConfig)) -> Memory {
    let mut config = TreeConfig { page_size: PAGE, ..TreeConfig::default() };
    change(&mut config);
    let tree = Tree::new(config).unwrap();
    Memory { tree, device: Numbers::new(device), host: Numbers::new(host), copies_work: true, copied: 0 }
}

/// Takes slots for a sequence and inserts it.
fn fill(memory: &mut Memory, sequence: &[u32]) -> NodeId {
    let pages = sequence.len() / PAGE;
    let windows = if memory.tree.components().contains(&Component::Window) { pages } else { 0 };
    let mut slots = memory.take_slots(Side::Device, &PerComponent([pages, windows, 0])).expect("room");
    let root = memory.tree.root(&CacheNamespace::default());
    let lock = memory.tree.lock(root).unwrap();
    let [full, window, _] = &mut slots.0;
    let insert = Insert { from: root, tokens: sequence, full, window, state: None, priority: 0 };
    let inserted = memory.tree.insert(insert).unwrap();
    memory.carry_out(inserted.actions);
    memory.tree.unlock(lock).unwrap();
    memory.tree.check_integrity().unwrap();
    inserted.node
}

fn find(memory: &mut Memory, sequence: &[u32]) -> Match {
    let root = memory.tree.root(&CacheNamespace::default());
    memory.tree.find(root, sequence).unwrap()
}

#[test]
fn t21_room_is_made_until_the_pool_has_enough() {
    let mut memory = memory([16, 12, 0], [0, 0, 0], |config| config.window = Some(2 * PAGE));
    for branch in 1..=6 {
        fill(&mut memory, &tokens(2, branch));
    }
    assert_eq!((memory.device.free(Component::Full), memory.device.free(Component::Window)), (4, 0));
    let slots = memory.take_slots(Side::Device, &PerComponent([5, 3, 0])).unwrap();
    assert_eq!((slots[Component::Full].len(), slots[Component::Window].len()), (5, 3));
    let left = (memory.tree.sizes(Component::Full).device, memory.tree.sizes(Component::Window).device);
    assert_eq!(
        left,
        (9, 9),
        "one page for full attention, which gave a window too, and two more windows with their leaf"
    );
    // What is held does not leave, and nothing leaves in vain.
    let found = find(&mut memory, &tokens(2, 6));
    let node = memory.tree.settle(found.device).unwrap();
    let lock = memory.tree.lock(node).unwrap();
    let free = memory.device.free(Component::Full);
    let all = PerComponent([free + 9, 0, 0]);
    assert!(memory.take_slots(Side::Device, &all).is_none());
    assert_eq!(memory.tree.sizes(Component::Full).device, 9);
    memory.tree.unlock(lock).unwrap();
    assert!(memory.take_slots(Side::Device, &all).is_some());
    assert_eq!(memory.tree.node_count(), 0);
}

#[test]
fn slots_of_earlier_components_come_back_in_reverse_order() {
    let mut memory = memory([8, 8, 1], [0, 0, 0], |config| config.window = Some(PAGE));
    assert!(memory.take_slots(Side::Device, &PerComponent([3, 2, 2])).is_none());
    assert_eq!(memory.device.returned, [Component::Window, Component::Full]);
    assert_eq!((memory.device.free(Component::Full), memory.device.free(Component::Window)), (8, 8));
}

fn write_back(config: &mut TreeConfig) {
    (config.below, config.write_back) = (Below::Host, true);
}

#[test]
fn t19_write_back_copies_down_what_leaves_or_drops_it() {
    for (copies_work, host) in [(true, [4, 4, 0]), (false, [4, 4, 0]), (true, [1, 1, 0])] {
        let mut memory = memory([4, 4, 0], host, |config| {
            write_back(config);
            config.window = Some(2 * PAGE);
        });
        memory.copies_work = copies_work;
        fill(&mut memory, &tokens(2, 1));
        fill(&mut memory, &tokens(2, 2));
        fill(&mut memory, &tokens(2, 3));
        let pages: Vec<u32> = (1..=3).map(|branch| find(&mut memory, &tokens(2, branch)).best.pages).collect();
        let kept = copies_work && host[0] == 4;
        assert_eq!(pages, [if kept { 2 } else { 0 }, 2, 2]);
        assert_eq!(memory.copied > 0, host[0] == 4);
        assert_eq!(memory.host.free(Component::Full), host[0] as usize - if kept { 2 } else { 0 });
        assert_eq!(find(&mut memory, &tokens(2, 1)).device.pages, 0);
    }
}

#[test]
fn the_host_makes_room_for_what_comes_down() {
    let mut memory = memory([2, 0, 0], [3, 0, 0], write_back);
    for branch in 1..=5 {
        fill(&mut memory, &tokens(2, branch));
    }
    let pages: Vec<u32> = (1..=5).map(|branch| find(&mut memory, &tokens(2, branch)).best.pages).collect();
    assert_eq!(pages, [0, 0, 1, 2, 2], "the oldest left, and of the next as much as was needed");
}

/// Under write-back a victim that can neither be copied nor dropped does not stand in the way of the others.
#[test]
fn t19_a_victim_that_cannot_leave_makes_way_for_the_next() {
    let mut memory = memory([4, 0, 0], [1, 0, 0], write_back);
    let end = fill(&mut memory, &tokens(2, 1));
    // Its second page is on the host alone, and being written to a store.
    let found = find(&mut memory, &tokens(2, 1));
    let head = memory.tree.settle(Boundary { used: 1, pages: 1, ..found.best }).unwrap();
    assert!(memory.back_up_now(end).unwrap());
    let actions = memory.tree.demote(end).unwrap();
    memory.carry_out(actions);
    memory.tree.set_stores(1);
    let (ticket, _) = memory.tree.begin_store(end, 1, Source::Host).unwrap().unwrap();
    fill(&mut memory, &tokens(2, 2));
    assert_eq!(memory.device.free(Component::Full), 1);
    assert!(memory.take_slots(Side::Device, &PerComponent([2, 0, 0])).is_some());
    assert!(memory.tree.contains(head) && !memory.tree.info(head).unwrap().on_host);
    let left = find(&mut memory, &tokens(2, 2)).full_pages;
    assert_eq!(left, 1, "of the other one as much left as was needed");
    memory.tree.finish_store(ticket, true).unwrap();
    memory.tree.check_integrity().unwrap();
}

#[test]
fn what_is_locked_to_be_loaded_does_not_leave_for_its_own_slots() {
    let change = |config: &mut TreeConfig| (config.window, config.below) = (Some(2 * PAGE), Below::Host);
    let mut memory = memory([4, 4, 0], [4, 2, 0], change);
    let node = fill(&mut memory, &tokens(2, 1));
    assert!(memory.back_up_now(node).unwrap());
    let actions = memory.tree.demote(node).unwrap();
    memory.carry_out(actions);
    let lock = memory.tree.lock(node).unwrap();
    let other = fill(&mut memory, &tokens(2, 2));
    assert!(!memory.back_up_now(other).unwrap(), "windows on the host are held");
    for component in Component::ALL {
        assert_eq!(memory.tree.evict_host(component, 1), Step::Exhausted);
    }
    let needs = memory.tree.load_needs(node).unwrap();
    let slots = memory.take_slots(Side::Device, &needs).unwrap();
    let ticket = memory.tree.begin_load(node, slots).unwrap();
    let none = memory.tree.finish_load(ticket, true).unwrap();
    assert_eq!(none, Actions::default());
    memory.tree.unlock(lock).unwrap();
    assert!(memory.back_up_now(other).unwrap(), "now they may go");
    memory.tree.check_integrity().unwrap();
}
