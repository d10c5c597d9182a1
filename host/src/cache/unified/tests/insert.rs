//! T12 to T17: what becomes of slots that are handed over.

use super::*;

/// Slots by what became of them.
fn freed_slots(actions: &Actions, wanted: Component) -> Vec<u32> {
    let mut freed = Vec::new();
    for action in &actions.0 {
        match action {
            Action::FreeDevice { component, slots } if *component == wanted => freed.extend(slots),
            _ => {}
        }
    }
    freed
}

fn run(range: std::ops::Range<u32>) -> Vec<std::ops::Range<u32>> {
    std::iter::once(range).collect()
}

#[test]
fn t12_each_slot_is_taken_or_freed_once() {
    let mut rig = Rig::windowed();
    let sequence = tokens(6, 1);
    let first = rig.insert(&sequence[..2 * PAGE]);
    rig.insert(&sequence[..4 * PAGE]);
    let (mut full, mut window) = ((100..104).collect::<Vec<u32>>(), (200..204).collect::<Vec<u32>>());
    window[0] = NO_SLOT;
    let table = rig.tree.device_table(Component::Full, rig.find(&sequence).device.node).unwrap();
    // The request goes on after what the tree has from it already: that is never given again.
    let insert = Insert {
        from: first,
        tokens: &sequence[2 * PAGE..],
        full: &mut full,
        window: &mut window,
        state: None,
        priority: 0,
    };
    let inserted = rig.tree.insert(insert).unwrap();
    assert_eq!(inserted.pages, 4);
    assert_eq!(freed_slots(&inserted.actions, Component::Full), [100, 101]);
    assert_eq!(freed_slots(&inserted.actions, Component::Window), [201], "what had been let go is not freed again");
    assert_eq!((full[..2].to_vec(), full[2..].to_vec()), (table[2..4].to_vec(), vec![102, 103]));
    assert_eq!(inserted.taken[Component::Full], run(2..4));
    assert_eq!(inserted.taken[Component::Window], run(2..4));
    // Slots that are the tree's already are not freed when they come once more.
    let again = Insert {
        from: first,
        tokens: &sequence[2 * PAGE..],
        full: &mut full,
        window: &mut window,
        state: None,
        priority: 0,
    };
    let again = rig.tree.insert(again).unwrap();
    assert_eq!((again.actions, again.taken), (Actions::default(), PerComponent::default()));
}

#[test]
fn t12_nothing_is_taken_where_the_tree_loads_by_itself() {
    let mut rig = Rig::new(|config| config.below = Below::Host);
    let sequence = tokens(4, 1);
    rig.insert(&sequence[..2 * PAGE]);
    let node = rig.node_at(&sequence, 2);
    rig.back_up(node);
    let _ = rig.tree.demote(node).unwrap();
    let slots = PerComponent([rig.fresh(2), Vec::new(), Vec::new()]);
    let ticket = rig.tree.begin_load(node, slots).unwrap();
    let inserted = rig.insert_from(rig.root, &sequence, 0, None);
    assert_eq!((inserted.pages, inserted.node, inserted.actions.0.len()), (0, rig.root, 0), "slots stay the caller's");
    assert!(rig.find(&sequence).loading);
    assert_eq!(rig.tree.finish_load(ticket, true).unwrap(), Actions::default());
    assert!(!rig.find(&sequence).loading);
    assert_eq!(rig.insert_from(rig.root, &sequence, 0, None).pages, 4);
}

#[test]
fn t13_computed_pages_bring_a_node_back_to_the_device() {
    let mut rig = Rig::new(|config| (config.below, config.window) = (Below::Host, Some(2 * PAGE)));
    let sequence = tokens(2, 1);
    let node = rig.insert(&sequence);
    rig.back_up(node);
    let _ = rig.tree.demote(node).unwrap();
    assert_eq!((rig.device_pages(&sequence), rig.find(&sequence).best.pages), (0, 2));
    let inserted = rig.insert_from(rig.root, &sequence, 0, None);
    assert_eq!(inserted.node, node, "it is the same node");
    assert_eq!((&inserted.taken[Component::Full], &inserted.taken[Component::Window]), (&run(0..2), &run(0..2)));
    assert_eq!(inserted.actions, Actions::default());
    assert_eq!(rig.device_pages(&sequence), 2);
    assert_eq!(rig.tree.sizes(Component::Full).host, 2, "the copy on the host stays");
}

#[test]
fn t14_a_window_comes_back_whether_full_pages_are_locked_or_not() {
    for locked in [false, true] {
        let mut rig = Rig::windowed();
        let sequence = tokens(4, 1);
        rig.insert(&sequence);
        let (front, end) = (rig.node_at(&sequence, 2), rig.node_at(&sequence, 4));
        let lock = locked.then(|| rig.tree.lock_parts(end, Parts::FULL).unwrap());
        for node in [front, end] {
            let _ = rig.tree.tombstone(Component::Window, node).unwrap();
        }
        let own = rig.tree.device_table(Component::Full, end).unwrap();
        assert_eq!(rig.device_pages(&sequence), 0);
        // The request has the last three pages of its window; the gap begins inside a node.
        let inserted = rig.insert_from(rig.root, &sequence, 1, None);
        assert_eq!(inserted.taken[Component::Window], run(1..4));
        assert!(inserted.taken[Component::Full].is_empty(), "full pages stay as they are, and those given are freed");
        assert_eq!(inserted.actions.freed_device(), PerComponent([4, 0, 0]));
        assert_eq!(rig.tree.device_table(Component::Full, end).unwrap(), own);
        assert_eq!(rig.tree.device_table(Component::Window, end).unwrap()[0], NO_SLOT);
        assert_eq!((rig.device_pages(&sequence), rig.device_pages(&sequence[..3 * PAGE])), (4, 3));
        assert_eq!(rig.device_pages(&sequence[..2 * PAGE]), 0);
        if let Some(lock) = lock {
            rig.tree.unlock(lock).unwrap();
        }
    }
}

#[test]
fn t15_the_leaf_at_the_end_has_one_window() {
    let mut rig = Rig::new(|config| config.window = Some(2 * PAGE - 1));
    let node = rig.insert(&tokens(9, 1));
    assert_eq!((rig.tree.start(node), rig.tree.end(node)), (Ok(7), Ok(9)), "rounded up to pages");
    let lock = rig.tree.lock(node).unwrap();
    assert_eq!(rig.sizes(Component::Window), (9, 7), "locking it pins one window, not the prompt");
    rig.tree.unlock(lock).unwrap();
    // A window shorter than a page still is a page; without live windows there is nothing to cut for.
    let mut rig = Rig::new(|config| config.window = Some(1));
    let node = rig.insert(&tokens(3, 1));
    assert_eq!(rig.tree.start(node), Ok(2));
    let node = rig.insert_from(rig.root, &tokens(3, 2), 3, None).node;
    assert_eq!(rig.tree.start(node), Ok(0));
    assert_eq!(rig.device_pages(&tokens(3, 2)), 0);
}

#[test]
fn t16_states_attach_to_the_end_alone() {
    let mut rig = Rig::with_states();
    let sequence = tokens(4, 1);
    let node = rig.insert(&sequence);
    assert_eq!(rig.device_pages(&sequence), 0, "without a state nothing can be gone on from");
    let attached = rig.insert_from(rig.root, &sequence[..2 * PAGE], 0, Some(50));
    assert_eq!((attached.state, rig.tree.end(attached.node)), (StateOutcome::Taken, Ok(2)));
    assert_eq!((rig.device_pages(&sequence), rig.find(&sequence).state_branch), (2, Some(4)));
    let known = rig.insert_from(rig.root, &sequence[..2 * PAGE], 0, Some(51));
    assert_eq!(known.state, StateOutcome::Known);
    assert_eq!(freed_slots(&known.actions, Component::State), [51]);
    assert_eq!(rig.tree.device_slots(Component::State, attached.node).unwrap(), [50]);
    // To the very node from which the request goes on, too.
    let nothing_new = rig.insert_from(node, &[], 0, Some(52));
    assert_eq!((nothing_new.state, nothing_new.node), (StateOutcome::Taken, node));
    assert_eq!(rig.insert_from(rig.root, &[], 0, Some(53)).state, StateOutcome::NotReached);
}

#[test]
fn t16_a_path_keeps_no_more_states_than_its_limit() {
    let mut rig = Rig::new(|config| config.states = Some(StateConfig { grid: PAGE, per_path: Some(2) }));
    let sequence = tokens(6, 1);
    let mut at = rig.root;
    let mut nodes = Vec::new();
    for page in 0..6 {
        let part = &sequence[page * PAGE..(page + 1) * PAGE];
        let inserted = rig.insert_from(at, part, 0, Some(60 + page as u32));
        assert_eq!(inserted.actions.0, [Action::CapStates { tail: inserted.node }]);
        at = inserted.node;
        nodes.push(at);
    }
    // The second is at a fork, the third is held.
    rig.insert_from(nodes[1], &tokens(1, 9), 0, None);
    let lock = rig.tree.lock(nodes[2]).unwrap();
    let actions = rig.tree.cap_states(at).unwrap();
    assert_eq!(freed_slots(&actions, Component::State), [60, 63, 64], "all that may go, as there are too many");
    let kept: Vec<bool> =
        nodes.iter().map(|&node| !rig.tree.device_slots(Component::State, node).unwrap().is_empty()).collect();
    assert_eq!(kept, [false, true, true, false, false, true]);
    rig.tree.unlock(lock).unwrap();
    let actions = rig.tree.cap_states(at).unwrap();
    assert_eq!(freed_slots(&actions, Component::State), [62]);
    assert_eq!(rig.tree.cap_states(at).unwrap(), Actions::default());
}

#[test]
fn t17_a_refused_insert_changes_nothing() {
    let mut rig = Rig::new(|config| (config.below, config.window) = (Below::Host, Some(2 * PAGE)));
    let node = rig.insert(&tokens(2, 1));
    rig.back_up(node);
    let _ = rig.tree.demote(node).unwrap();
    let before = (rig.sizes(Component::Full), rig.sizes(Component::Window), rig.tree.node_count());
    let rest = tokens(2, 2);
    let insert = |rig: &mut Rig, from, window: &mut [u32], state| {
        let mut full = [7, 8];
        let result = rig.tree.insert(Insert { from, tokens: &rest, full: &mut full, window, state, priority: 0 });
        assert_eq!(full, [7, 8]);
        result.unwrap_err().to_string()
    };
    let root = rig.root;
    assert_eq!(insert(&mut rig, root, &mut [1], None), "window slots: 1 given, 2 needed");
    assert_eq!(insert(&mut rig, root, &mut [1, 2], Some(3)), "state slots: 1 given, 0 needed");
    assert!(insert(&mut rig, node, &mut [1, 2], None).ends_with("it is not on the device"));
    assert_eq!((rig.sizes(Component::Full), rig.sizes(Component::Window), rig.tree.node_count()), before);
}
