//! What is remembered of pages: whether anything proves them, and that they were here.

use super::*;

fn host_insert<'a>(rig: &Rig, tokens: &'a [u32], full: &'a [u32], unproven: bool) -> HostInsert<'a> {
    let start = tokens.len() / PAGE - full.len();
    let root = rig.root;
    HostInsert { root, tokens, start, keys: &[], full, window: &[], state: None, stored: 1, owed: 0, unproven }
}

/// Pages that nothing proves, and what is computed or fetched on top of them, stay marked wherever nodes are cut and joined.
#[test]
fn what_nothing_proves_and_what_comes_after_it_stays_marked() {
    let mut rig = Rig::new(|config| config.below = Below::Host);
    let sequence = tokens(6, 1);
    let proven = rig.tree.insert_host(host_insert(&rig, &sequence[..PAGE], &[10], false)).unwrap().node;
    let unproven = rig.tree.insert_host(host_insert(&rig, &sequence[..3 * PAGE], &[11, 12], true)).unwrap().node;
    let later = rig.tree.insert_host(host_insert(&rig, &sequence[..4 * PAGE], &[13], false)).unwrap().node;
    let head = rig.node_at(&sequence, 2);
    let marks = |rig: &Rig, nodes: &[NodeId]| -> Vec<bool> {
        nodes.iter().map(|&node| rig.tree.info(node).unwrap().unproven).collect()
    };
    assert_eq!(marks(&rig, &[proven, head, unproven, later]), [false, true, true, true]);
    // Loaded, and gone on from by a computed page.
    let slots = PerComponent([rig.fresh(4), Vec::new(), Vec::new()]);
    let ticket = rig.tree.begin_load(later, slots).unwrap();
    let _ = rig.tree.finish_load(ticket, true).unwrap();
    let computed = rig.insert_from(later, &sequence[4 * PAGE..], 0, None).node;
    assert!(rig.tree.merge_up(later).unwrap());
    assert!(!rig.tree.contains(head) && rig.tree.contains(proven), "nothing is joined across the mark");
    let beside = rig.insert(&fork(&sequence, 1, 1, 7));
    assert_eq!(marks(&rig, &[proven, later, computed, beside]), [false, true, true, false]);
}

#[test]
fn what_left_is_remembered_with_its_place() {
    let mut rig = Rig::new(|_| {});
    let sequence = tokens(4, 1);
    rig.insert(&sequence);
    let page = |at: usize| &sequence[at * PAGE..(at + 1) * PAGE];
    assert!(!rig.tree.was_evicted(rig.root, 2, page(2)));
    let _ = freed(rig.tree.evict_device(Component::Full, 2));
    assert!(rig.tree.was_evicted(rig.root, 2, page(2)), "the page after what is left");
    assert!(!rig.tree.was_evicted(rig.root, 1, page(2)) && !rig.tree.was_evicted(rig.root, 0, page(0)));
    let other = rig.tree.root(&CacheNamespace::new(None, Some("salt".to_owned())));
    assert!(!rig.tree.was_evicted(other, 2, page(2)));
    assert!(rig.tree.is_elsewhere(other, page(0)) && !rig.tree.is_elsewhere(rig.root, page(0)));
    assert!(!rig.tree.is_elsewhere(other, page(1)), "only what a sequence begins with");
    rig.tree.retire_root(other);
}

#[test]
fn a_prefix_is_ready_loading_or_lacking() {
    let mut rig = Rig::new(|config| (config.below, config.window) = (Below::Host, Some(2 * PAGE)));
    let sequence = tokens(4, 1);
    let node = rig.insert(&sequence);
    let head = rig.tree.path(node).unwrap()[0];
    assert_eq!(rig.tree.readiness(rig.root), Ok(Readiness::Ready));
    assert_eq!(rig.tree.readiness(node), Ok(Readiness::Ready));
    rig.back_up(head);
    rig.back_up(node);
    let _ = rig.tree.tombstone(Component::Window, head).unwrap();
    assert_eq!(rig.tree.readiness(node), Ok(Readiness::Ready), "a window before the last one is not needed");
    assert_eq!(rig.tree.readiness(head), Ok(Readiness::Lacking));
    let _ = rig.tree.demote(node).unwrap();
    assert_eq!(rig.tree.readiness(node), Ok(Readiness::Lacking));
    let needs = rig.tree.load_needs(node).unwrap();
    let slots = PerComponent(needs.0.map(|count| rig.fresh(count)));
    let ticket = rig.tree.begin_load(node, slots).unwrap();
    assert_eq!(rig.tree.readiness(node), Ok(Readiness::Loading));
    let longer = fork(&sequence, 4, 1, 8);
    let longer = rig.tree.insert_host(host_insert(&rig, &longer, &[90], false)).unwrap().node;
    assert_eq!(rig.tree.readiness(longer), Ok(Readiness::Loading), "nothing of it can be loaded before that has ended");
    let _ = rig.tree.finish_load(ticket, true).unwrap();
    assert_eq!(rig.tree.readiness(node), Ok(Readiness::Ready));
}

#[test]
fn rules_that_cannot_be_used_change_nothing() {
    let mut rig = Rig::new(|_| {});
    assert!(rig.tree.set_rules(BackupRule::OnEviction, true).is_err(), "no host to write back to");
    assert!(!rig.tree.config().write_back);
    let mut rig = Rig::new(|config| config.below = Below::Host);
    let node = rig.insert(&tokens(1, 1));
    rig.tree.set_rules(BackupRule::AfterHits(2), true).unwrap();
    assert_eq!(rig.tree.count_use(node, 0).unwrap().0, [Action::Backup { nodes: vec![node] }]);
    let step = rig.tree.evict_device(Component::Full, 1);
    assert_eq!(step, Step::BackUpFirst { node, component: Component::Full });
}
