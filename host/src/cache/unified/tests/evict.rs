//! T06 to T08 and T18 to T21: what leaves, and in which order.

use super::*;

#[test]
fn t06_windows_and_states_leave_the_middle_of_a_path_by_themselves() {
    let mut rig = Rig::new(|config| {
        config.window = Some(2 * PAGE);
        config.states = Some(StateConfig { grid: PAGE, per_path: None });
    });
    let sequence = tokens(4, 1);
    let first = rig.insert_from(rig.root, &sequence[..2 * PAGE], 0, Some(10)).node;
    rig.insert_from(first, &sequence[2 * PAGE..], 0, Some(11));
    let actions = freed(rig.tree.evict_device(Component::State, 1));
    assert_eq!(actions.freed_device(), PerComponent([0, 0, 1]), "the older one");
    assert_eq!(rig.device_pages(&sequence[..2 * PAGE]), 0);
    rig.insert_from(rig.root, &sequence[..2 * PAGE], 0, Some(12));
    rig.tree.touch(rig.find(&sequence).device.node).unwrap();
    let actions = rig.tree.tombstone(Component::Window, first).unwrap();
    assert_eq!(actions.freed_device(), PerComponent([0, 2, 1]), "a state is of no use without its window");
    assert_eq!((rig.find(&sequence).full_pages, rig.device_pages(&sequence)), (4, 4), "full pages stay");
}

#[test]
fn t07_full_pages_leave_from_the_leaves_inward() {
    let mut rig = Rig::new(|_| {});
    let trunk = tokens(2, 1);
    let old = rig.insert(&fork(&trunk, 2, 2, 2));
    let new = rig.insert(&fork(&trunk, 2, 2, 3));
    let inner = rig.tree.path(new).unwrap()[0];
    assert_eq!(rig.tree.path(old).unwrap()[0], inner);
    let mut order = Vec::new();
    for left in [old, new, inner] {
        assert_eq!(freed(rig.tree.evict_device(Component::Full, 2)).freed_device()[Component::Full], 2);
        assert!(!rig.tree.contains(left));
        order.push(rig.tree.node_count());
        rig.checked();
    }
    assert_eq!(order, [2, 1, 0]);
    assert_eq!(rig.tree.evict_device(Component::Full, 1), Step::Exhausted);
}

#[test]
fn t07_of_a_long_leaf_only_as_much_leaves_as_is_wanted() {
    let mut rig = Rig::new(|_| {});
    let sequence = tokens(8, 1);
    rig.insert(&sequence);
    assert_eq!(freed(rig.tree.evict_device(Component::Full, 3)).freed_device()[Component::Full], 3);
    assert_eq!(rig.device_pages(&sequence), 5);
}

#[test]
fn t08_what_somebody_holds_is_spared() {
    let mut rig = Rig::new(|config| {
        config.window = Some(2 * PAGE);
        config.states = Some(StateConfig { grid: PAGE, per_path: None });
    });
    let node = rig.insert_from(rig.root, &tokens(2, 1), 0, Some(10)).node;
    let state_only = rig.tree.lock_parts(node, Parts { window: false, state: true }).unwrap();
    let actions = freed(rig.tree.evict_device(Component::Window, 2));
    assert_eq!(
        actions.freed_device(),
        PerComponent([0, 2, 0]),
        "the state is held, and so are the full pages of the leaf"
    );
    assert_eq!(rig.tree.evict_device(Component::State, 1), Step::Exhausted);
    assert_eq!(rig.tree.evict_device(Component::Full, 1), Step::Exhausted);
    rig.tree.unlock(state_only).unwrap();
    let actions = freed(rig.tree.evict_device(Component::State, 1));
    assert_eq!(actions.freed_device(), PerComponent([2, 0, 1]), "a leaf that nobody holds leaves as a whole");
}

#[test]
fn t18_steps_free_what_the_sizes_say() {
    let mut rig = Rig::new(|config| (config.below, config.window) = (Below::Host, Some(2 * PAGE)));
    for branch in 1..6 {
        let node = rig.insert(&tokens(5, branch));
        if branch % 2 == 0 {
            rig.back_up(node);
        }
    }
    loop {
        let before = Component::ALL.map(|component| rig.tree.sizes(component));
        let step = match rig.tree.evict_device(Component::Window, 1) {
            Step::Exhausted => rig.tree.evict_device(Component::Full, 2),
            step => step,
        };
        let Step::Freed(actions) = step else { break };
        for component in Component::ALL {
            let (was, is) = (before[component as usize], rig.tree.sizes(component));
            assert_eq!(was.device - is.device, actions.freed_device()[component]);
            assert_eq!(was.host - is.host, actions.freed_host()[component]);
        }
    }
    assert_eq!((rig.sizes(Component::Full), rig.sizes(Component::Window)), ((0, 0), (0, 0)));
}

fn writing_back() -> Rig {
    Rig::new(|config| (config.below, config.write_back) = (Below::Host, true))
}

#[test]
fn t19_a_victim_pauses_for_its_copy_and_leaves_after_it() {
    let mut rig = writing_back();
    let sequence = tokens(2, 1);
    let node = rig.insert(&sequence);
    let step = rig.tree.evict_device(Component::Full, 2);
    assert_eq!(step, Step::BackUpFirst { node, component: Component::Full });
    assert_eq!(rig.tree.evict_device(Component::Full, 2), step, "it stays the next one until something is done");
    assert!(rig.tree.demote(node).is_err(), "there is no copy yet");
    rig.back_up(node);
    assert_eq!(rig.tree.demote(node).unwrap().freed_device()[Component::Full], 2);
    assert_eq!((rig.device_pages(&sequence), rig.find(&sequence).best.pages), (0, 2));
}

#[test]
fn t19_a_victim_that_was_taken_up_meanwhile_stays() {
    let mut rig = writing_back();
    let sequence = tokens(2, 1);
    let node = rig.insert(&sequence);
    let Step::BackUpFirst { node: paused, .. } = rig.tree.evict_device(Component::Full, 2) else { panic!() };
    assert_eq!(paused, node);
    rig.back_up(node);
    let lock = rig.tree.lock(node).unwrap();
    assert!(rig.tree.demote(node).unwrap_err().to_string().ends_with("in use or no leaf of the device any more"));
    assert!(rig.tree.drop_subtree(node).unwrap_err().to_string().ends_with("it is in use"));
    rig.tree.unlock(lock).unwrap();
    let longer = rig.insert(&[sequence.clone(), tokens(1, 5)].concat());
    assert!(rig.tree.demote(node).is_err(), "it is no leaf any more");
    let _ = rig.tree.drop_subtree(longer).unwrap();
    assert_eq!(rig.tree.demote(node).unwrap().freed_device()[Component::Full], 2);
    let _ = rig.tree.drop_subtree(node).unwrap();
    assert!(rig.tree.demote(node).is_err(), "it is gone");
}

#[test]
fn t19_windows_inside_a_path_pause_too() {
    let mut rig = Rig::new(|config| {
        (config.below, config.write_back, config.window) = (Below::Host, true, Some(2 * PAGE));
    });
    let sequence = tokens(4, 1);
    rig.insert(&sequence);
    let front = rig.node_at(&sequence, 2);
    assert_eq!(
        rig.tree.evict_device(Component::Window, 2),
        Step::BackUpFirst { node: front, component: Component::Window }
    );
    rig.back_up(front);
    let actions = rig.tree.tombstone(Component::Window, front).unwrap();
    assert_eq!(actions.freed_device(), PerComponent([0, 2, 0]));
    let found = rig.find(&sequence[..2 * PAGE]);
    assert_eq!((found.device.pages, found.best.pages), (0, 2), "the copy serves");
}

#[test]
fn t19_without_room_on_the_host_a_subtree_is_dropped() {
    let mut rig = writing_back();
    let sequence = tokens(4, 1);
    let end = rig.insert(&sequence);
    let front = rig.node_at(&sequence, 2);
    rig.back_up(end);
    let _ = rig.tree.demote(end).unwrap();
    let step = rig.tree.evict_device(Component::Full, 2);
    assert_eq!(step, Step::BackUpFirst { node: front, component: Component::Full });
    let actions = rig.tree.drop_subtree(front).unwrap();
    assert_eq!((actions.freed_device()[Component::Full], actions.freed_host()[Component::Full]), (2, 2));
    assert_eq!(rig.tree.node_count(), 0, "what could not be reached any more went along");
}

/// Branches in the order in which they leave.
fn order_of(policy: Policy) -> Vec<u32> {
    let mut rig = Rig::new(|config| config.policy = policy);
    let mut nodes = Vec::new();
    for branch in 1..=5 {
        let (mut full, sequence) = (rig.fresh(1), tokens(1, branch));
        let priority = [0, 5, 1, 1, 0][branch as usize - 1];
        let insert =
            Insert { from: rig.root, tokens: &sequence, full: &mut full, window: &mut [], state: None, priority };
        nodes.push((branch, rig.tree.insert(insert).unwrap().node));
    }
    // Uses after the one at the insert, in this order.
    for branch in [1, 1, 1, 3, 2, 2] {
        let node = nodes[branch - 1].1;
        let _ = rig.tree.count_use(node, 0).unwrap();
        rig.tree.touch(node).unwrap();
    }
    let mut order = Vec::new();
    while let Step::Freed(_) = rig.tree.evict_device(Component::Full, 1) {
        nodes.retain(|&(branch, node)| {
            let stays = rig.tree.contains(node);
            if !stays {
                order.push(branch);
            }
            stays
        });
    }
    order
}

#[test]
fn t20_each_policy_has_its_order() {
    // Hits: 1 has 4, 2 has 3, 3 has 2, 4 and 5 have 1. Last used: 4, 5, 1, 3, 2.
    assert_eq!(order_of(Policy::Lru), [4, 5, 1, 3, 2]);
    assert_eq!(order_of(Policy::Lfu), [4, 5, 3, 2, 1]);
    assert_eq!(order_of(Policy::Slru), [4, 5, 1, 3, 2]);
    assert_eq!(order_of(Policy::Fifo), [1, 2, 3, 4, 5]);
    assert_eq!(order_of(Policy::Priority), [5, 1, 4, 3, 2]);
}

#[test]
fn t20_slru_protects_what_was_used_again_against_what_is_newer() {
    let mut rig = Rig::new(|config| config.policy = Policy::Slru);
    let again = rig.insert(&tokens(1, 1));
    rig.insert(&tokens(1, 1));
    let newer = rig.insert(&tokens(1, 2));
    let _ = freed(rig.tree.evict_device(Component::Full, 1));
    assert_eq!((rig.tree.contains(again), rig.tree.contains(newer)), (true, false));
}

#[test]
fn the_queue_of_victims_does_not_grow_with_what_came_and_went() {
    let mut rig = Rig::windowed();
    for branch in 0..2000 {
        rig.insert(&tokens(1, branch));
        let _ = freed(rig.tree.evict_device(Component::Window, 1));
    }
    assert!(rig.tree.device_victims.len() < 100, "{} entries for no nodes", rig.tree.device_victims.len());
}

#[test]
fn windows_and_states_leave_by_last_use() {
    let mut rig = Rig::new(|config| {
        config.window = Some(2 * PAGE);
        config.states = Some(StateConfig { grid: PAGE, per_path: None });
    });
    let mut branch = |number: u32| {
        let sequence = tokens(6, number);
        let middle = rig.insert_from(rig.root, &sequence[..4 * PAGE], 0, Some(100 + number)).node;
        let end = rig.insert_from(middle, &sequence[4 * PAGE..], 0, Some(200 + number)).node;
        (middle, end)
    };
    let (first, second) = (branch(1), branch(2));
    rig.tree.touch(first.1).unwrap();
    let slots = |tree: &Tree, node| tree.device_slots(Component::State, node).unwrap().len();
    // The state in the middle of the first is older than those of the second: going past it was no use of it.
    for (expected, node) in [(0, first.0), (0, second.0)] {
        let _ = freed(rig.tree.evict_device(Component::State, 1));
        assert_eq!(slots(&rig.tree, node), expected);
    }
    let _ = freed(rig.tree.evict_device(Component::State, 1));
    assert!(rig.tree.contains(first.1) && !rig.tree.contains(second.1), "the end of the first was used last");
    // Of windows those that the end needs were used, and not those before them.
    let window = |tree: &Tree, node| tree.device_slots(Component::Window, node).unwrap().len();
    let front = rig.tree.path(first.1).unwrap()[0];
    for _ in 0..8 {
        if window(&rig.tree, front) == 0 {
            break;
        }
        let _ = freed(rig.tree.evict_device(Component::Window, 2));
    }
    assert_eq!((window(&rig.tree, front), window(&rig.tree, first.1)), (0, 2));
}
