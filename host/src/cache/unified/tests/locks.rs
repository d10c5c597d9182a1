//! T09 to T11: receipts.

use super::*;

#[test]
fn t09_a_receipt_releases_exactly_what_it_took() {
    let mut rig = Rig::windowed();
    let sequence = tokens(8, 1);
    let node = rig.insert(&sequence);
    let lock = rig.tree.lock(node).unwrap();
    assert_eq!(lock.window_from(), Some(6), "the end leaf has one window");
    assert_eq!(rig.sizes(Component::Window), (8, 6));
    // The segment is cut, and a second request holds half of it.
    let half = rig.node_at(&sequence, 7);
    let other = rig.tree.lock(half).unwrap();
    rig.tree.unlock(lock).unwrap();
    assert_eq!(rig.sizes(Component::Window), (8, 1), "the other's segment reaches over the node before");
    rig.tree.unlock(other).unwrap();
    assert_eq!((rig.sizes(Component::Full), rig.sizes(Component::Window)), ((8, 8), (8, 8)));
}

#[test]
fn t09_a_name_whose_node_is_gone_is_unknown_for_ever() {
    let mut rig = Rig::new(|_| {});
    let node = rig.insert(&tokens(2, 1));
    let _ = rig.tree.drop_subtree(node).unwrap();
    let again = rig.insert(&tokens(2, 2));
    assert_eq!(again.index, node.index, "its place is used again");
    let unknown = TreeError::UnknownNode(node);
    assert_eq!(rig.tree.lock(node).unwrap_err(), unknown);
    assert_eq!(rig.tree.key_path(node).unwrap_err(), unknown);
    assert_eq!(rig.tree.drop_subtree(node).unwrap_err(), unknown);
    assert!(rig.tree.contains(again) && !rig.tree.contains(node));
}

#[test]
fn t10_what_comes_under_a_lock_is_protected_at_once() {
    let mut rig = Rig::windowed();
    let sequence = tokens(2, 1);
    let node = rig.insert(&sequence);
    let _ = rig.tree.tombstone(Component::Window, node).unwrap();
    let lock = rig.tree.lock(node).unwrap();
    assert_eq!(rig.sizes(Component::Window), (0, 0), "tombstones are counted, not their slots");
    rig.insert(&sequence);
    assert_eq!(rig.sizes(Component::Window), (2, 0));
    assert_eq!(rig.tree.evict_device(Component::Window, 1), Step::Exhausted);
    rig.tree.unlock(lock).unwrap();
    assert_eq!(rig.sizes(Component::Window), (2, 2));
}

#[test]
fn t11_a_window_released_early_is_not_released_again() {
    let mut rig = Rig::new(|config| {
        config.window = Some(2 * PAGE);
        config.states = Some(StateConfig { grid: PAGE, per_path: None });
    });
    let node = rig.insert_from(rig.root, &tokens(4, 1), 0, Some(90)).node;
    let mut first = rig.tree.lock(node).unwrap();
    let second = rig.tree.lock(node).unwrap();
    rig.tree.release_window(&mut first).unwrap();
    rig.tree.release_window(&mut first).unwrap();
    assert_eq!((first.window_from(), first.holds_state()), (None, false), "the state goes with it");
    assert_eq!((rig.sizes(Component::Window), rig.sizes(Component::State)), ((4, 2), (1, 0)), "the second holds both");
    rig.tree.unlock(first).unwrap();
    assert_eq!((rig.sizes(Component::Window), rig.sizes(Component::State)), ((4, 2), (1, 0)));
    rig.tree.unlock(second).unwrap();
    assert_eq!((rig.sizes(Component::Window), rig.sizes(Component::State)), ((4, 4), (1, 1)));
}

#[test]
fn t11_a_window_released_early_may_leave_while_full_pages_stay() {
    let mut rig = Rig::windowed();
    let node = rig.insert(&tokens(2, 1));
    let mut lock = rig.tree.lock(node).unwrap();
    assert_eq!(rig.tree.evict_device(Component::Window, 1), Step::Exhausted);
    rig.tree.release_window(&mut lock).unwrap();
    let actions = freed(rig.tree.evict_device(Component::Window, 1));
    assert_eq!(actions.freed_device(), PerComponent([0, 2, 0]));
    rig.tree.unlock(lock).unwrap();
    assert_eq!(rig.sizes(Component::Full), (2, 2));
}

#[test]
fn a_pin_holds_full_pages_alone() {
    let mut rig = Rig::windowed();
    let node = rig.insert(&tokens(2, 1));
    let pin = rig.tree.lock_parts(node, Parts::FULL).unwrap();
    assert_eq!((rig.sizes(Component::Full), rig.sizes(Component::Window)), ((2, 0), (2, 2)));
    rig.tree.unlock(pin).unwrap();
}

#[test]
fn a_sequence_that_grew_page_by_page_becomes_one_node() {
    let mut rig = Rig::new(|_| {});
    let sequence = tokens(6, 1);
    let mut at = rig.root;
    let mut lock = rig.tree.lock(at).unwrap();
    for page in 0..6 {
        at = rig.insert_from(at, &sequence[page * PAGE..(page + 1) * PAGE], 0, None).node;
        let longer = rig.tree.lock(at).unwrap();
        rig.tree.unlock(std::mem::replace(&mut lock, longer)).unwrap();
    }
    let keys = rig.tree.key_path(at).unwrap().keys();
    assert_eq!(rig.tree.node_count(), 6);
    rig.tree.merge_up(at).unwrap();
    assert_eq!(rig.tree.node_count(), 1, "all parts are held alike");
    assert_eq!(rig.tree.key_path(at).unwrap().keys(), keys);
    assert_eq!(rig.tree.device_table(Component::Full, at).unwrap(), [0, 1, 2, 3, 4, 5]);
    rig.tree.unlock(lock).unwrap();
    assert_eq!(rig.device_pages(&sequence), 6);
    let branch = rig.node_at(&sequence, 3);
    let lock = rig.tree.lock(branch).unwrap();
    rig.tree.merge_up(at).unwrap();
    assert_eq!(rig.tree.node_count(), 2, "one part is held by somebody who does not hold the other");
    rig.tree.unlock(lock).unwrap();
}

#[test]
fn a_sequence_that_goes_on_growing_stays_a_few_nodes() {
    let mut rig = Rig::new(|_| {});
    let sequence = tokens(300, 1);
    let mut lock = rig.tree.lock(rig.root).unwrap();
    for page in sequence.chunks(PAGE) {
        let end = rig.insert_from(lock.node(), page, 0, None).node;
        let longer = rig.tree.lock(end).unwrap();
        rig.tree.unlock(std::mem::replace(&mut lock, longer)).unwrap();
        rig.tree.merge_growing(end).unwrap();
        assert!(rig.tree.node_count() <= 9, "{} nodes", rig.tree.node_count());
    }
    let table = rig.tree.device_table(Component::Full, lock.node()).unwrap();
    assert_eq!(table, (0..300).collect::<Vec<u32>>());
    rig.tree.unlock(lock).unwrap();
    assert_eq!((rig.device_pages(&sequence), rig.sizes(Component::Full)), (300, (300, 300)));
}
