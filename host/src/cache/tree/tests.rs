//! The tree by itself.

use super::insert::InsertedDevice;
use super::*;

const STORED: StorageMarks = StorageMarks { settled: 1, owed: 0, unproven: false };

const PAGE: usize = 4;

fn tree() -> (Tree, NodeId) {
    let mut tree = Tree::new(PAGE, EvictionPolicy::Lru);
    let root = tree.root(&CacheNamespace::default());
    (tree, root)
}

fn tokens(start: u32, pages: usize) -> Vec<u32> {
    (0..(pages * PAGE) as u32).map(|i| start * 1000 + i).collect()
}

fn insert(tree: &mut Tree, root: NodeId, tokens: &[u32], first_page: u32) -> InsertedDevice {
    let mut pages: Vec<u32> = (0..(tokens.len() / PAGE) as u32).map(|i| first_page + i).collect();
    tree.lock(root);
    let result = tree.insert_device(root, tokens, &mut pages);
    tree.unlock(root);
    result
}

#[test]
fn matches_go_by_whole_pages() {
    let (mut tree, root) = tree();
    let all = tokens(1, 4);
    insert(&mut tree, root, &all, 10);
    assert_eq!(tree.find(root, &all).pages, 4);
    assert_eq!(tree.find(root, &all[..PAGE * 3 + 3]).pages, 3);
    assert_eq!(tree.find(root, &all[..PAGE - 1]).pages, 0);
    let mut changed = all.clone();
    changed[PAGE * 2 + 3] += 1;
    assert_eq!(tree.find(root, &changed).pages, 2, "a page matches whole or not at all");
    tree.check().unwrap();
}

#[test]
fn nodes_are_cut_at_page_boundaries_and_joined_again() {
    let (mut tree, root) = tree();
    let first = tokens(1, 6);
    let second = [&first[..2 * PAGE], &tokens(2, 3)[..]].concat();
    let end = insert(&mut tree, root, &first, 10).node;
    let result = insert(&mut tree, root, &second, 50);
    assert_eq!(result.duplicates, [50, 51]);
    assert_eq!(result.adopted, [52, 53, 54]);
    assert_eq!(tree.node_count(), 3);
    assert_eq!(tree.node(end).start, 2, "the cut node keeps its tail");
    assert_eq!(tree.node(end).device, [12, 13, 14, 15]);
    tree.check().unwrap();
    let gone = tree.evict_device(result.node).unwrap();
    assert_eq!(gone.device, [52, 53, 54]);
    tree.merge_up(end);
    assert_eq!((tree.node_count(), tree.node(end).device.len()), (1, 6));
    assert_eq!(tree.find(root, &first).pages, 6);
    tree.check().unwrap();
}

#[test]
fn a_lock_holds_the_whole_path_and_survives_cuts() {
    let (mut tree, root) = tree();
    let all = tokens(1, 6);
    let end = insert(&mut tree, root, &all, 10).node;
    tree.lock(end);
    let head = tree.split(end, 4);
    assert_eq!((tree.node(head).locks, tree.node(end).locks), (1, 1));
    assert_eq!(tree.device_victim(), None);
    assert_eq!(tree.totals(), (6, 0, 0));
    tree.lock(head);
    tree.unlock(end);
    assert_eq!(tree.device_victim(), Some(end), "the tail is free, the head is not");
    tree.evict_device(end).unwrap();
    assert_eq!(tree.device_victim(), None);
    tree.unlock(head);
    assert_eq!(tree.device_victim(), Some(head));
    tree.refresh(head);
    tree.check().unwrap();
}

#[test]
fn what_is_below_leaves_before_what_is_above() {
    let (mut tree, root) = tree();
    let first = tokens(1, 4);
    let second = [&first[..2 * PAGE], &tokens(2, 2)[..]].concat();
    insert(&mut tree, root, &first, 10);
    insert(&mut tree, root, &second, 20);
    // Use the older branch: the other one goes first, then this one, then what they share.
    let older = tree.find(root, &first).node;
    tree.hit(older);
    let mut order = Vec::new();
    while let Some(victim) = tree.device_victim() {
        order.push(tree.evict_device(victim).unwrap().device);
        tree.check().unwrap();
    }
    assert_eq!(order, [vec![22, 23], vec![12, 13], vec![10, 11]]);
    assert_eq!(tree.node_count(), 0);
}

#[test]
fn a_stale_name_is_not_another_node() {
    let (mut tree, root) = tree();
    let end = insert(&mut tree, root, &tokens(1, 2), 10).node;
    let name = tree.reference(end);
    assert_eq!(tree.resolve(name), Some(end));
    tree.evict_device(end).unwrap();
    assert_eq!(tree.resolve(name), None);
    // The namespace became empty and went too.
    let root = tree.root(&CacheNamespace::default());
    let again = insert(&mut tree, root, &tokens(2, 2), 10).node;
    assert!(again == end || root == end, "the slot is used again");
    assert_eq!(tree.resolve(name), None);
}

#[test]
fn namespaces_share_nothing_and_empty_ones_go() {
    let mut tree = Tree::new(PAGE, EvictionPolicy::Lru);
    let names = [
        CacheNamespace::default(),
        CacheNamespace::new(None, Some("a".to_owned())),
        CacheNamespace::new(Some("a".to_owned()), None),
    ];
    let all = tokens(1, 3);
    for (i, name) in names.iter().enumerate() {
        let root = tree.root(name);
        assert_eq!(tree.find(root, &all).pages, 0);
        let result = insert(&mut tree, root, &all, 100 * i as u32);
        assert!(result.duplicates.is_empty());
    }
    let paths: Vec<Vec<PageKey>> = names
        .iter()
        .map(|name| {
            let root = tree.find_root(name).unwrap();
            let found = tree.find(root, &all);
            tree.key_path(found.node, found.used).keys(PAGE)
        })
        .collect();
    assert!(paths[0][0] != paths[1][0] && paths[1][0] != paths[2][0] && paths[0][0] != paths[2][0]);
    tree.check().unwrap();
    while let Some(victim) = tree.device_victim() {
        tree.evict_device(victim).unwrap();
    }
    assert!(names.iter().all(|name| tree.find_root(name).is_none()));
    tree.check().unwrap();
}

/// Nodes made while storage was off get their keys parent first, from the start of the sequence.
#[test]
fn keys_are_anchored_at_the_start_whatever_was_cut() {
    let (mut tree, root) = tree();
    let all = tokens(1, 8);
    let expected = crate::cache::hash::chain_keys(None, &all, PAGE);
    let end = insert(&mut tree, root, &all, 10).node;
    tree.split(end, 3);
    let path = tree.key_path(end, 2);
    tree.split(end, 1);
    assert_eq!(path.keys(PAGE), expected[..5], "an operation keeps what it began with");
    let found = tree.find(root, &all);
    assert_eq!(tree.key_path(found.node, found.used).keys(PAGE), expected);
}

#[test]
fn host_pages_without_their_prefix_are_not_taken() {
    let (mut tree, root) = tree();
    let all = tokens(1, 6);
    let keys = crate::cache::hash::chain_keys(None, &all, PAGE);
    let result = tree.insert_host(root, &all, 2, &keys[2..], vec![2, 3, 4, 5], STORED);
    assert!(result.orphaned);
    assert_eq!(result.rejected, [2, 3, 4, 5]);
    let result = tree.insert_host(root, &all[..4 * PAGE], 0, &keys[..4], vec![0, 1, 2, 3], STORED);
    assert_eq!((result.node.map(|node| tree.len(node)), result.orphaned), (Some(4), false));
    let result = tree.insert_host(root, &all, 2, &keys[2..], vec![12, 13, 14, 15], STORED);
    assert_eq!((result.node.map(|node| tree.len(node)), result.rejected), (Some(2), vec![12, 13]));
    let found = tree.find(root, &all);
    assert_eq!((found.pages, found.device_pages), (6, 0));
    tree.check().unwrap();
}

#[test]
fn pages_that_are_being_loaded_are_neither_read_nor_replaced() {
    let (mut tree, root) = tree();
    let all = tokens(1, 4);
    let keys = crate::cache::hash::chain_keys(None, &all, PAGE);
    tree.insert_host(root, &all, 0, &keys, vec![0, 1, 2, 3], STORED);
    let node = tree.find(root, &all).node;
    tree.set_device(node, vec![10, 11, 12, 13], true);
    let result = insert(&mut tree, root, &all, 50);
    assert_eq!((result.pages, result.adopted.len(), result.duplicates.len()), (0, 0, 0));
    assert_eq!(tree.device_victim(), None);
    assert_eq!(tree.host_victim(), None);
    tree.check().unwrap();
    tree.update_since(node, 0, |node| node.loading = false);
    let result = insert(&mut tree, root, &all, 50);
    assert_eq!((result.pages, result.duplicates.len()), (4, 4));
    tree.check().unwrap();
}
