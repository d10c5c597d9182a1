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

impl SlotPools for Numbers {
    fn free(&self, component: Component) -> usize {
        self.free[component].len()
    }

    fn take(&mut self, component: Component, count: usize) -> Option<Vec<u32>> {
        let free = &mut self.free[component];
        (free.len() >= count).then(|| (0..count).filter_map(|_| free.pop_first()).collect())
    }

    fn give_back(&mut self, component: Component, slots: &[u32]) {
        self.returned.push(component);
        for &slot in slots {
            assert!(self.free[component].insert(slot), "slot {slot} of {component:?} was free");
        }
    }
}

/// Pools with a word in each slot.
struct Memory {
    device: Numbers,
    host: Numbers,
    copies_work: bool,
    copied: usize,
}

impl Tiers for Memory {
    fn device(&mut self) -> &mut dyn SlotPools {
        &mut self.device
    }

    fn host(&mut self) -> Option<&mut dyn SlotPools> {
        Some(&mut self.host)
    }

    fn copy_down(&mut self, _: Component, device: &[u32], host: &[u32]) -> bool {
        assert_eq!(device.len(), host.len());
        self.copied += device.len();
        self.copies_work
    }
}

fn memory(device: [u32; 3], host: [u32; 3]) -> Memory {
    Memory { device: Numbers::new(device), host: Numbers::new(host), copies_work: true, copied: 0 }
}

/// Takes slots for a sequence and inserts it.
fn fill(tree: &mut Tree, memory: &mut Memory, sequence: &[u32]) -> NodeId {
    let pages = sequence.len() / PAGE;
    let windows = if tree.components().contains(&Component::Window) { pages } else { 0 };
    let mut slots = Room::new(tree, memory).take_device(&PerComponent([pages, windows, 0])).expect("room");
    let root = tree.root(&CacheNamespace::default());
    let lock = tree.lock(root).unwrap();
    let [full, window, _] = &mut slots.0;
    let inserted =
        tree.insert(Insert { from: root, tokens: sequence, full, window, state: None, priority: 0 }).unwrap();
    let others = Room::new(tree, memory).carry_out(inserted.actions);
    assert_eq!(others, []);
    tree.unlock(lock).unwrap();
    tree.check_integrity().unwrap();
    inserted.node
}

fn config(change: impl FnOnce(&mut TreeConfig)) -> Tree {
    let mut config = TreeConfig { page_size: PAGE, ..TreeConfig::default() };
    change(&mut config);
    Tree::new(config).unwrap()
}

#[test]
fn t21_room_is_made_until_the_pool_has_enough() {
    let (mut tree, mut memory) = (config(|config| config.window = Some(2 * PAGE)), memory([16, 12, 0], [0, 0, 0]));
    for branch in 1..=6 {
        fill(&mut tree, &mut memory, &tokens(2, branch));
    }
    assert_eq!((memory.device.free(Component::Full), memory.device.free(Component::Window)), (4, 0));
    let slots = Room::new(&mut tree, &mut memory).take_device(&PerComponent([5, 3, 0])).unwrap();
    assert_eq!((slots[Component::Full].len(), slots[Component::Window].len()), (5, 3));
    let left = (tree.sizes(Component::Full).device, tree.sizes(Component::Window).device);
    assert_eq!(
        left,
        (9, 9),
        "one page for full attention, which gave a window too, and two more windows with their leaf"
    );
    // What is held does not leave, and nothing leaves in vain.
    let root = tree.root(&CacheNamespace::default());
    let found = tree.find(root, &tokens(2, 6)).unwrap();
    let node = tree.settle(found.device).unwrap();
    let lock = tree.lock(node).unwrap();
    let free = memory.device.free(Component::Full);
    let all = PerComponent([free + 9, 0, 0]);
    assert!(Room::new(&mut tree, &mut memory).take_device(&all).is_none());
    assert_eq!(tree.sizes(Component::Full).device, 9);
    tree.unlock(lock).unwrap();
    assert!(Room::new(&mut tree, &mut memory).take_device(&all).is_some());
    assert_eq!(tree.node_count(), 0);
}

#[test]
fn slots_of_earlier_components_come_back_in_reverse_order() {
    let (mut tree, mut memory) = (config(|config| config.window = Some(PAGE)), memory([8, 8, 1], [0, 0, 0]));
    assert!(Room::new(&mut tree, &mut memory).take_device(&PerComponent([3, 2, 2])).is_none());
    assert_eq!(memory.device.returned, [Component::Window, Component::Full]);
    assert_eq!((memory.device.free(Component::Full), memory.device.free(Component::Window)), (8, 8));
}

#[test]
fn t19_write_back_copies_down_what_leaves_or_drops_it() {
    for (copies_work, host) in [(true, [4, 4, 0]), (false, [4, 4, 0]), (true, [1, 1, 0])] {
        let (mut tree, mut memory) = (
            config(|config| (config.window, config.below, config.write_back) = (Some(2 * PAGE), Below::Host, true)),
            memory([4, 4, 0], host),
        );
        memory.copies_work = copies_work;
        fill(&mut tree, &mut memory, &tokens(2, 1));
        fill(&mut tree, &mut memory, &tokens(2, 2));
        fill(&mut tree, &mut memory, &tokens(2, 3));
        let root = tree.root(&CacheNamespace::default());
        let pages: Vec<u32> = (1..=3).map(|branch| tree.find(root, &tokens(2, branch)).unwrap().best.pages).collect();
        let kept = copies_work && host[0] == 4;
        assert_eq!(pages, [if kept { 2 } else { 0 }, 2, 2]);
        assert_eq!(memory.copied > 0, host[0] == 4);
        assert_eq!(memory.host.free(Component::Full), host[0] as usize - if kept { 2 } else { 0 });
        assert_eq!(tree.find(root, &tokens(2, 1)).unwrap().device.pages, 0);
    }
}

#[test]
fn the_host_makes_room_for_what_comes_down() {
    let (mut tree, mut memory) =
        (config(|config| (config.below, config.write_back) = (Below::Host, true)), memory([2, 0, 0], [3, 0, 0]));
    for branch in 1..=5 {
        fill(&mut tree, &mut memory, &tokens(2, branch));
    }
    let root = tree.root(&CacheNamespace::default());
    let pages: Vec<u32> = (1..=5).map(|branch| tree.find(root, &tokens(2, branch)).unwrap().best.pages).collect();
    assert_eq!(pages, [0, 0, 1, 2, 2], "the oldest left, and of the next as much as was needed");
}

#[test]
fn what_is_locked_to_be_loaded_does_not_leave_for_its_own_slots() {
    let change = |config: &mut TreeConfig| (config.window, config.below) = (Some(2 * PAGE), Below::Host);
    let (mut tree, mut memory) = (config(change), memory([4, 4, 0], [4, 2, 0]));
    let node = fill(&mut tree, &mut memory, &tokens(2, 1));
    assert!(Room::new(&mut tree, &mut memory).back_up_now(node).unwrap());
    let actions = tree.demote(node).unwrap();
    Room::new(&mut tree, &mut memory).carry_out(actions);
    let lock = tree.lock(node).unwrap();
    let other = fill(&mut tree, &mut memory, &tokens(2, 2));
    assert!(!Room::new(&mut tree, &mut memory).back_up_now(other).unwrap(), "windows on the host are held");
    for component in Component::ALL {
        assert_eq!(tree.evict_host(component, 1), Step::Exhausted);
    }
    let needs = tree.load_needs(node).unwrap();
    let slots = Room::new(&mut tree, &mut memory).take_device(&needs).unwrap();
    let ticket = tree.begin_load(node, slots).unwrap();
    let none = tree.finish_load(ticket, true).unwrap();
    assert_eq!(none, Actions::default());
    tree.unlock(lock).unwrap();
    assert!(Room::new(&mut tree, &mut memory).back_up_now(other).unwrap(), "now they may go");
    tree.check_integrity().unwrap();
}
