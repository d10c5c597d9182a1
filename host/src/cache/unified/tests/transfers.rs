//! T22 and T25, and copies between tiers.

use super::*;

fn backups(actions: &Actions) -> Vec<Vec<NodeId>> {
    let found = actions.0.iter().filter_map(|action| match action {
        Action::Backup { nodes } => Some(nodes.clone()),
        _ => None,
    });
    found.collect()
}

#[test]
fn t22_backups_come_with_what_is_before_them_from_the_root_on() {
    for below in [Below::Host, Below::Stores] {
        let mut rig = Rig::new(|config| (config.below, config.backup) = (below, BackupRule::AfterHits(2)));
        let trunk = tokens(2, 1);
        let first = rig.insert_from(rig.root, &trunk, 0, None);
        assert_eq!(backups(&first.actions), Vec::<Vec<NodeId>>::new(), "one use is not enough");
        let long = fork(&trunk, 2, 2, 2);
        let leaf = rig.insert_from(first.node, &long[2 * PAGE..], 0, None).node;
        // A request that holds the trunk already counts the leaf alone; the trunk comes along.
        let again = rig.insert_from(first.node, &long[2 * PAGE..], 0, None);
        assert_eq!(backups(&again.actions), [vec![first.node, leaf]]);
        for node in [first.node, leaf] {
            match below {
                Below::Host => rig.back_up(node),
                _ => {
                    for bit in [1, 2] {
                        let (ticket, _) = rig.tree.begin_store(node, bit, Source::Device).unwrap().unwrap();
                        let pending = rig.tree.count_use(leaf, 0).unwrap();
                        assert_eq!(backups(&pending).is_empty(), node == leaf && bit == 2, "not offered while it runs");
                        rig.tree.finish_store(ticket, true).unwrap();
                    }
                }
            }
        }
        assert_eq!(backups(&rig.tree.count_use(leaf, 0).unwrap()), Vec::<Vec<NodeId>>::new(), "done");
    }
}

#[test]
fn t22_what_comes_to_a_node_later_is_backed_up_later() {
    for below in [Below::Host, Below::Stores] {
        let mut rig = Rig::new(|config| {
            (config.below, config.backup) = (below, BackupRule::AfterHits(1));
            config.states = Some(StateConfig { grid: PAGE, per_path: None });
        });
        rig.tree.set_stores(1);
        let sequence = tokens(2, 1);
        let node = rig.insert(&sequence);
        match below {
            Below::Host => rig.back_up(node),
            _ => {
                let (ticket, _) = rig.tree.begin_store(node, 1, Source::Device).unwrap().unwrap();
                rig.tree.finish_store(ticket, true).unwrap();
            }
        }
        let attached = rig.insert_from(rig.root, &sequence, 0, Some(9));
        assert_eq!(backups(&attached.actions), [vec![node]]);
        match below {
            Below::Host => assert_eq!(rig.tree.backup_needs(node).unwrap(), PerComponent([0, 0, 1])),
            _ => {
                let (ticket, slots) = rig.tree.begin_store(node, 1, Source::Device).unwrap().unwrap();
                assert_eq!(slots, PerComponent([vec![], vec![], vec![9]]), "the rest is stored");
                rig.tree.finish_store(ticket, true).unwrap();
                assert!(rig.tree.begin_store(node, 1, Source::Device).unwrap().is_none());
            }
        }
    }
}

#[test]
fn t25_a_request_counts_a_node_once() {
    let mut rig = Rig::new(|_| {});
    let sequence = tokens(6, 1);
    let hits = |rig: &Rig, node: NodeId| rig.tree.arena.node(node.index).hits;
    // Three checkpoints of one request, each from where the one before ended.
    let mut at = rig.root;
    let mut nodes = Vec::new();
    for part in sequence.chunks(2 * PAGE) {
        at = rig.insert_from(at, part, 0, None).node;
        nodes.push(at);
    }
    assert_eq!(nodes.iter().map(|&node| hits(&rig, node)).collect::<Vec<_>>(), [1, 1, 1]);
    // Another one is granted two of them, and commits the third.
    let _ = rig.tree.count_use(nodes[1], 0).unwrap();
    rig.insert_from(nodes[1], &sequence[4 * PAGE..], 0, None);
    assert_eq!(nodes.iter().map(|&node| hits(&rig, node)).collect::<Vec<_>>(), [2, 2, 2]);
}

#[test]
fn a_failed_load_leaves_the_host_as_it_was() {
    let mut rig = Rig::new(|config| (config.below, config.window) = (Below::Host, Some(2 * PAGE)));
    let sequence = tokens(4, 1);
    let node = rig.insert(&sequence);
    for node in rig.tree.path(node).unwrap() {
        rig.back_up(node);
    }
    while let Step::Freed(_) = rig.tree.evict_device(Component::Full, 4) {}
    let needs = rig.tree.load_needs(node).unwrap();
    assert_eq!(needs, PerComponent([4, 2, 0]), "of windows the last one");
    let slots = PerComponent(needs.0.map(|count| rig.fresh(count)));
    let ticket = rig.tree.begin_load(node, slots.clone()).unwrap();
    assert!(rig.tree.begin_load(node, Slots::default()).is_err(), "once at a time");
    assert_eq!(rig.tree.evict_host(Component::Full, 1), Step::Exhausted, "it is being read");
    // The node is cut while it is loaded.
    rig.node_at(&sequence, 3);
    let mut filled =
        rig.tree.load_copies(&ticket).unwrap().into_iter().flat_map(|copy| copy.device).collect::<Vec<_>>();
    filled.sort_unstable();
    let mut given = slots.0.concat();
    given.sort_unstable();
    assert_eq!(filled, given);
    let actions = rig.tree.finish_load(ticket, false).unwrap();
    assert_eq!(actions.freed_device(), needs);
    let found = rig.find(&sequence);
    assert_eq!((found.device.pages, found.best.pages, found.loading), (0, 4, false));
}

#[test]
fn a_failed_copy_gives_its_slots_back_also_after_a_cut() {
    let mut rig = Rig::new(|config| config.below = Below::Host);
    let sequence = tokens(4, 1);
    let node = rig.insert(&sequence);
    let slots = PerComponent([rig.fresh(4), Vec::new(), Vec::new()]);
    let ticket = rig.tree.begin_backup(node, slots).unwrap();
    rig.node_at(&sequence, 1);
    assert_eq!(rig.find(&sequence).best.pages, 4);
    let actions = rig.tree.finish_backup(ticket, false).unwrap();
    assert_eq!(actions.freed_host()[Component::Full], 4);
    assert_eq!((rig.tree.sizes(Component::Full).host, rig.sizes(Component::Full)), (0, (4, 4)));
}

#[test]
fn pages_from_a_store_fill_what_is_missing() {
    let mut rig = Rig::new(|config| {
        (config.below, config.window) = (Below::Host, Some(2 * PAGE));
        config.states = Some(StateConfig { grid: PAGE, per_path: None });
    });
    let sequence = tokens(4, 1);
    rig.insert(&sequence[..PAGE]);
    let keys = Units::Tokens.keys(None, &sequence, PAGE);
    let insert = HostInsert {
        root: rig.root,
        tokens: &sequence,
        start: 1,
        keys: &keys[1..],
        full: &[11, 12, 13],
        window: &[NO_SLOT, 22, 23],
        state: Some(30),
        stored: 1,
        owed: 2,
        unproven: false,
    };
    let inserted = rig.tree.insert_host(insert).unwrap();
    assert_eq!((inserted.taken, inserted.orphaned, inserted.actions), (6, false, Actions::default()));
    let found = rig.find(&sequence);
    assert_eq!((found.device.pages, found.best.pages), (0, 4));
    assert_eq!(found.load, PerComponent([3, 2, 1]));
    assert_eq!(rig.tree.key_path(inserted.node).unwrap().keys(), keys);
    let twice = HostInsert {
        root: rig.root,
        tokens: &sequence,
        start: 2,
        keys: &[],
        full: &[42, 43],
        window: &[],
        state: Some(44),
        stored: 1,
        owed: 0,
        unproven: false,
    };
    let twice = rig.tree.insert_host(twice).unwrap();
    assert_eq!((twice.taken, twice.actions.freed_host()), (0, PerComponent([2, 0, 1])));
    let orphan = tokens(3, 8);
    let orphan = HostInsert {
        root: rig.root,
        tokens: &orphan,
        start: 2,
        keys: &[],
        full: &[52],
        window: &[],
        state: None,
        stored: 1,
        owed: 0,
        unproven: false,
    };
    let orphan = rig.tree.insert_host(orphan).unwrap();
    assert_eq!((orphan.orphaned, orphan.actions.freed_host()), (true, PerComponent([1, 0, 0])));
}

#[test]
fn what_was_emptied_is_offered_again() {
    let mut rig = Rig::new(|config| (config.below, config.backup) = (Below::Stores, BackupRule::AfterHits(1)));
    rig.tree.set_stores(1);
    let node = rig.insert(&tokens(2, 1));
    let (ticket, _) = rig.tree.begin_store(node, 1, Source::Device).unwrap().unwrap();
    rig.tree.finish_store(ticket, true).unwrap();
    assert_eq!(backups(&rig.tree.count_use(node, 0).unwrap()).len(), 0);
    rig.tree.forget_stores(1);
    assert_eq!(backups(&rig.tree.count_use(node, 0).unwrap()), [vec![node]]);
    rig.tree.set_stores(0b10);
    assert!(
        rig.tree
            .begin_store(node, 0b10, Source::Device)
            .unwrap()
            .is_some_and(|(ticket, _)| { rig.tree.finish_store(ticket, true).is_ok() })
    );
}

#[test]
fn a_node_is_copied_once_at_a_time() {
    let mut rig = Rig::new(|config| (config.below, config.window) = (Below::Host, Some(2 * PAGE)));
    let node = rig.insert(&tokens(2, 1));
    let full = PerComponent([rig.fresh(2), Vec::new(), Vec::new()]);
    let ticket = rig.tree.begin_backup(node, full).unwrap();
    let window = PerComponent([Vec::new(), rig.fresh(2), Vec::new()]);
    let refusal = rig.tree.begin_backup(node, window.clone()).unwrap_err();
    assert!(refusal.to_string().ends_with("it is being copied already"), "the end of the one would end the other");
    assert_eq!(rig.tree.finish_backup(ticket, true).unwrap(), Actions::default());
    let ticket = rig.tree.begin_backup(node, window).unwrap();
    let actions = rig.tree.finish_backup(ticket, false).unwrap();
    assert_eq!(actions.freed_host(), PerComponent([0, 2, 0]), "the other's are not touched");
}

#[test]
fn a_state_that_is_being_loaded_does_not_keep_pages_out() {
    let mut rig = Rig::new(|config| {
        (config.below, config.states) = (Below::Host, Some(StateConfig { grid: PAGE, per_path: None }));
    });
    let sequence = tokens(2, 1);
    let node = rig.insert_from(rig.root, &sequence, 0, Some(5)).node;
    rig.back_up(node);
    let _ = rig.tree.tombstone(Component::State, node).unwrap();
    let ticket = rig.tree.begin_load(node, PerComponent([Vec::new(), Vec::new(), vec![6]])).unwrap();
    let longer = [sequence.clone(), tokens(1, 7)].concat();
    let inserted = rig.insert_from(rig.root, &longer, 0, Some(8));
    assert_eq!((inserted.pages, inserted.state), (3, StateOutcome::Taken));
    // The one that comes is not needed twice.
    let twice = rig.insert_from(rig.root, &sequence, 0, Some(9));
    assert_eq!((twice.state, twice.actions.freed_device()), (StateOutcome::Known, PerComponent([2, 0, 1])));
    let actions = rig.tree.finish_load(ticket, false).unwrap();
    assert_eq!(actions.freed_device(), PerComponent([0, 0, 1]));
    assert_eq!((rig.device_pages(&sequence), rig.device_pages(&longer)), (0, 3));
}
