//! T01 to T05: lengths, namespaces, splits, windows.

use super::*;

fn from_store<'a>(root: NodeId, tokens: &'a [u32], full: &'a [u32], window: &'a [u32]) -> HostInsert<'a> {
    HostInsert { root, tokens, start: 0, keys: &[], full, window, state: None, stored: 1, owed: 0, unproven: false }
}

/// Who holds or loads a boundary does so with one window, however long the node is.
#[test]
fn t15_a_long_node_is_cut_before_the_window_of_its_end() {
    let mut rig = Rig::new(|config| (config.window, config.below) = (Some(2 * PAGE), Below::Host));
    let sequence = tokens(6, 1);
    let (full, window) = (rig.fresh(6), rig.fresh(6));
    let node = rig.tree.insert_host(from_store(rig.root, &sequence, &full, &window)).unwrap().node;
    assert_eq!(rig.tree.start(node), Ok(0));
    rig.tree.cut_window(node).unwrap();
    assert_eq!((rig.tree.start(node), rig.tree.end(node)), (Ok(4), Ok(6)), "it keeps its name and its end");
    assert_eq!(rig.tree.load_needs(node), Ok(PerComponent([6, 2, 0])));
    rig.tree.check_integrity().unwrap();
}

#[test]
fn t05_a_store_fills_windows_beside_full_pages_that_are_here() {
    let mut rig = Rig::new(|config| (config.window, config.below) = (Some(2 * PAGE), Below::Host));
    let sequence = tokens(4, 1);
    let full = rig.fresh(4);
    let first = rig.tree.insert_host(from_store(rig.root, &sequence, &full, &[])).unwrap();
    assert_eq!(first.taken, 4);
    let found = rig.find(&sequence);
    assert_eq!((found.best.pages, found.held, found.full_pages), (0, 4, 4), "a window alone is lacking");
    let slots = rig.fresh(2);
    let window = [NO_SLOT, NO_SLOT, slots[0], slots[1]];
    let second = rig.tree.insert_host(from_store(rig.root, &sequence, &[NO_SLOT; 4], &window)).unwrap();
    assert_eq!((second.taken, second.orphaned), (2, false));
    let found = rig.find(&sequence);
    assert_eq!((found.best.pages, found.held), (4, 0));
    // Full pages that were not given and are not here: nothing stands on them.
    let other = tokens(4, 2);
    let slots = rig.fresh(2);
    let window = [NO_SLOT, NO_SLOT, slots[0], slots[1]];
    let third = rig.tree.insert_host(from_store(rig.root, &other, &[NO_SLOT; 4], &window)).unwrap();
    assert_eq!((third.taken, third.orphaned), (0, true));
    assert_eq!(third.actions.freed_host(), PerComponent([0, 2, 0]));
    rig.tree.check_integrity().unwrap();
}

#[test]
fn t01_all_lengths_are_floored_to_pages() {
    let mut rig = Rig::new(|_| {});
    let sequence = tokens(3, 1);
    let inserted = rig.insert_from(rig.root, &sequence[..2 * PAGE + 3], 0, None);
    assert_eq!(inserted.pages, 2);
    assert_eq!(rig.device_pages(&sequence), 2);
    assert_eq!(rig.device_pages(&sequence[..PAGE + 3]), 1);
    assert_eq!(rig.device_pages(&sequence[..PAGE - 1]), 0, "less than a page matches nothing");
    let short = rig.insert_from(rig.root, &tokens(1, 2)[..PAGE - 1], 0, None);
    assert_eq!((short.pages, short.node), (0, rig.root), "and inserts nothing");
    assert_eq!(rig.sizes(Component::Full), (2, 2));
    let mut other = sequence.clone();
    other[PAGE + 1] = 9999;
    assert_eq!(rig.device_pages(&other), 1, "a difference within a page");
}

#[test]
fn t02_namespaces_share_nothing() {
    let mut rig = Rig::new(|_| {});
    let sequence = tokens(2, 1);
    rig.insert(&sequence);
    let text = |text: &str| Some(text.to_owned());
    let names = [
        CacheNamespace::new(text("lora"), None),
        CacheNamespace::new(None, text("lora")),
        CacheNamespace::new(text("lora"), text("salt")),
    ];
    for (place, name) in names.iter().enumerate() {
        let root = rig.tree.root(name);
        assert_eq!(rig.tree.find(root, &sequence).unwrap().full_pages, 0, "{name:?}");
        rig.insert_from(root, &sequence, 0, None);
        assert_eq!(rig.sizes(Component::Full).0, 2 * (place + 2), "{name:?} has pages of its own");
    }
    assert_eq!(rig.tree.root(&CacheNamespace::new(None, text(""))), rig.root, "an empty salt is none");
}

#[test]
fn t03_bigrams_make_one_unit_less_than_tokens() {
    let mut rig = Rig::new(|config| config.units = Units::Bigrams);
    let sequence = tokens(3, 1);
    assert_eq!(rig.insert_from(rig.root, &sequence[..2 * PAGE], 0, None).pages, 1);
    assert_eq!(rig.insert_from(rig.root, &sequence[..2 * PAGE + 1], 0, None).pages, 2);
    assert_eq!(rig.insert_from(rig.root, &[], 0, None).pages, 0);
    assert_eq!(rig.insert_from(rig.root, &[5], 0, None).pages, 0);
    assert_eq!(rig.device_pages(&sequence[..2 * PAGE]), 1);
    assert_eq!(rig.device_pages(&sequence[..2 * PAGE + 1]), 2);
    let mut other = sequence;
    other[2 * PAGE] = 9999;
    assert_eq!(rig.device_pages(&other), 1, "the last pair of the second page differs");
}

#[test]
fn t04_a_cut_keeps_locks_keys_hits_and_marks() {
    let mut rig = Rig::new(|config| (config.below, config.backup) = (Below::Stores, BackupRule::AfterHits(1)));
    let sequence = tokens(4, 1);
    let node = rig.insert(&sequence);
    rig.tree.mark_stored(node, PerComponent([0; 3]), 0b10).unwrap();
    let (ticket, slots) = rig.tree.begin_store(node, 0b01, Source::Device).unwrap().unwrap();
    let lock = rig.tree.lock(node).unwrap();
    let keys = rig.tree.key_path(node).unwrap().keys();
    let hits = rig.tree.arena.node(node.index).hits;

    let found = rig.find(&sequence[..2 * PAGE + 1]);
    assert_eq!((found.device.pages, rig.tree.node_count()), (2, 1), "reading cuts nothing");
    let head = rig.tree.settle(found.device).unwrap();
    assert_eq!((rig.tree.end(head), rig.tree.start(node), rig.tree.end(node)), (Ok(2), Ok(2), Ok(4)));
    assert_eq!(rig.tree.device_table(Component::Full, node).unwrap(), slots[Component::Full]);
    for part in [head, node] {
        assert_eq!(rig.tree.stored(Component::Full, part), Ok(0b10));
        let state = rig.tree.arena.node(part.index);
        assert_eq!((state.hits, state.full.locks, state.full.writing), (hits, 2, 0b01));
        let known = state.span.known_keys().expect("keys were cut with the tokens");
        assert_eq!(known, &keys[state.start as usize..state.end() as usize]);
        assert!(rig.tree.begin_store(part, 0b01, Source::Device).unwrap().is_none(), "both are being written");
    }
    assert_eq!(rig.tree.evict_device(Component::Full, 1), Step::Exhausted);
    rig.tree.finish_store(ticket, true).unwrap();
    assert_eq!(rig.tree.evict_device(Component::Full, 1), Step::Exhausted, "the other lock holds both");
    rig.tree.unlock(lock).unwrap();
    assert_eq!([head, node].map(|part| rig.tree.stored(Component::Full, part)), [Ok(0b11), Ok(0b11)]);
    assert_eq!(rig.sizes(Component::Full), (4, 4));
}

#[test]
fn t04_a_state_stays_with_the_part_that_it_ends() {
    let mut rig = Rig::with_states();
    let sequence = tokens(4, 1);
    let node = rig.insert_from(rig.root, &sequence, 0, Some(70)).node;
    let lock = rig.tree.lock(node).unwrap();
    let found = rig.find(&sequence[..3 * PAGE]);
    assert_eq!((found.full_pages, found.device.pages), (3, 0), "in the middle of a node there is no state");
    assert_eq!(found.state_branch, Some(3));
    let head = rig.node_at(&sequence, 3);
    assert!(rig.tree.device_slots(Component::State, head).unwrap().is_empty());
    assert_eq!(rig.tree.device_slots(Component::State, node).unwrap(), [70]);
    assert_eq!(rig.device_pages(&sequence), 4, "and the end is as good as before");
    assert_eq!(rig.sizes(Component::State), (1, 0));
    rig.tree.unlock(lock).unwrap();
    assert_eq!(rig.sizes(Component::State), (1, 1));
}

#[test]
fn t04_a_failed_write_of_a_node_that_was_cut_is_offered_again_part_by_part() {
    let mut rig = Rig::new(|config| config.below = Below::Stores);
    let sequence = tokens(4, 1);
    let node = rig.insert(&sequence);
    let keys = rig.tree.key_path(node).unwrap().keys();
    let (ticket, _) = rig.tree.begin_store(node, 1, Source::Device).unwrap().unwrap();
    let head = rig.node_at(&sequence, 1);
    rig.tree.finish_store(ticket, false).unwrap();
    assert_eq!(rig.sizes(Component::Full), (4, 4), "held no more");
    let mut again = Vec::new();
    for part in [head, node] {
        let (ticket, slots) = rig.tree.begin_store(part, 1, Source::Device).unwrap().unwrap();
        let path = rig.tree.key_path(part).unwrap();
        assert_eq!(path.pages() - ticket.start() as usize, slots[Component::Full].len());
        again.extend(path.keys().split_off(ticket.start() as usize));
        rig.tree.finish_store(ticket, true).unwrap();
    }
    assert_eq!(again, keys);
    let (failing, _) = rig.tree.begin_store(node, 2, Source::Device).unwrap().unwrap();
    rig.tree.finish_store(failing, false).unwrap();
    assert_eq!(rig.tree.stored(Component::Full, node), Ok(1), "a failure takes back nothing that is stored");
}

#[test]
fn t05_after_a_gap_a_whole_window_is_needed() {
    let mut rig = Rig::windowed();
    let sequence = tokens(6, 1);
    let node = rig.insert(&sequence);
    for pages in 1..=6 {
        assert_eq!(rig.device_pages(&sequence[..pages * PAGE]), pages as u32, "without a gap every length is good");
    }
    // A window of one page in the middle leaves.
    rig.node_at(&sequence, 2);
    let middle = rig.node_at(&sequence, 3);
    let actions = rig.tree.tombstone(Component::Window, middle).unwrap();
    assert_eq!(actions.freed_device(), PerComponent([0, 1, 0]));
    let good: Vec<u32> = (1..=6).map(|pages| rig.device_pages(&sequence[..pages * PAGE])).collect();
    assert_eq!(good, [1, 2, 2, 2, 5, 6], "3 ends in the gap, 4 has but one page behind it");
    let found = rig.find(&sequence[..4 * PAGE]);
    assert_eq!((found.full_pages, found.window_branch), (4, Some(4)), "a window kept there would have served");
    assert!(rig.tree.contains(node));
}

#[test]
fn t05_host_windows_count_where_the_host_does() {
    let mut rig = Rig::new(|config| (config.window, config.below) = (Some(2 * PAGE), Below::Host));
    let sequence = tokens(4, 1);
    rig.insert(&sequence);
    let (front, end) = (rig.node_at(&sequence, 2), rig.node_at(&sequence, 4));
    rig.back_up(front);
    rig.back_up(end);
    let actions = rig.tree.demote(end).unwrap();
    assert_eq!(actions.freed_device(), PerComponent([2, 2, 0]));
    let found = rig.find(&sequence);
    assert_eq!((found.device.pages, found.best.pages), (2, 4));
    assert_eq!(found.load, PerComponent([2, 2, 0]));
    // The window of the first part alone leaves the device: only it is missing there, and only where it is needed.
    let _ = rig.tree.tombstone(Component::Window, front).unwrap();
    let found = rig.find(&sequence[..2 * PAGE]);
    assert_eq!((found.device.pages, found.best.pages, found.load), (0, 2, PerComponent([0, 2, 0])));
    assert_eq!(rig.find(&sequence).load, PerComponent([2, 2, 0]), "of windows what the end needs");
}

#[test]
fn pages_behind_a_gap_are_used_and_not_given_twice() {
    let mut rig = Rig::windowed();
    let sequence = tokens(6, 1);
    let end = rig.insert(&sequence);
    rig.node_at(&sequence, 2);
    let last = rig.node_at(&sequence, 6);
    for node in rig.tree.path(last).unwrap().split_off(1) {
        let _ = rig.tree.tombstone(Component::Window, node).unwrap();
    }
    let found = rig.find(&sequence);
    assert_eq!((found.device.pages, found.resident.pages), (2, 6));
    // A request goes on from page 2, with the full pages of the tree and windows of its own.
    let device = rig.tree.settle(found.device).unwrap();
    let resident = rig.tree.settle(found.resident).unwrap();
    let pin = rig.tree.lock_parts(resident, Parts::FULL).unwrap();
    let lock = rig.tree.lock(device).unwrap();
    let mut full = rig.tree.device_table(Component::Full, resident).unwrap().split_off(2);
    let mut window = rig.fresh(4);
    window[..2].fill(NO_SLOT);
    let insert = Insert {
        from: device,
        tokens: &sequence[2 * PAGE..],
        full: &mut full,
        window: &mut window,
        state: None,
        priority: 3,
    };
    let inserted = rig.tree.insert(insert).unwrap();
    assert_eq!((inserted.node, inserted.actions), (end, Actions::default()), "nothing was there twice");
    assert!(inserted.taken[Component::Full].is_empty());
    assert_eq!(rig.device_pages(&sequence), 6);
    let info = rig.tree.info(end).unwrap();
    assert_eq!((info.start + info.pages, info.priority, info.on_device, info.on_host), (6, 3, true, false));
    rig.tree.unlock(pin).unwrap();
    rig.tree.unlock(lock).unwrap();
}
