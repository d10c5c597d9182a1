//! Nodes and how they hang together: places, names, siblings, the table of children, the roots of namespaces.

use std::collections::HashMap;
use std::hash::BuildHasher;
use std::sync::Arc;

use hashbrown::{DefaultHashBuilder, HashTable};

use super::node::{Index, NONE, Node, NodeId};
use super::span::Span;
use crate::cache::CacheNamespace;
use crate::plugin::backend::PageKey;

/// A child's place with the hash that found it, so that the table grows and mismatches are passed over without a look at nodes.
#[derive(Debug, Clone, Copy)]
struct Entry {
    hash: u32,
    index: Index,
}

impl Entry {
    /// The table takes its upper bits apart from the lower ones; both must differ from entry to entry.
    fn spread(hash: u32) -> u64 {
        u64::from(hash).wrapping_mul(0x9E37_79B9_7F4A_7C15)
    }
}

#[derive(Debug)]
pub(super) struct Root {
    pub namespace: CacheNamespace,
    pub seed: Option<PageKey>,
    /// Tells namespaces apart in fingerprints.
    pub tag: u64,
}

#[derive(Debug)]
pub(super) struct Arena {
    nodes: Vec<Node>,
    vacant: Vec<Index>,
    /// Places left alone for ever.
    used_up: usize,
    children: HashTable<Entry>,
    hasher: DefaultHashBuilder,
    roots: HashMap<CacheNamespace, Index>,
    root_info: HashMap<Index, Root>,
    /// Tokens that make the first page of a node, with what its last unit reaches over.
    first_page: usize,
}

impl Arena {
    pub fn new(first_page: usize) -> Self {
        Arena {
            nodes: Vec::new(),
            vacant: Vec::new(),
            used_up: 0,
            children: HashTable::new(),
            hasher: DefaultHashBuilder::default(),
            roots: HashMap::new(),
            root_info: HashMap::new(),
            first_page,
        }
    }

    pub fn reserve(&mut self, nodes: usize) {
        let more = nodes.saturating_sub(self.live_count());
        self.nodes.reserve(more.saturating_sub(self.vacant.len()));
        self.children.reserve(more, |entry| Entry::spread(entry.hash));
    }

    pub fn node(&self, at: Index) -> &Node {
        &self.nodes[at as usize]
    }

    pub fn node_mut(&mut self, at: Index) -> &mut Node {
        &mut self.nodes[at as usize]
    }

    pub fn id(&self, at: Index) -> NodeId {
        NodeId { index: at, generation: self.node(at).generation }
    }

    pub fn resolve(&self, id: NodeId) -> Option<Index> {
        let node = self.nodes.get(id.index as usize)?;
        (node.live && node.generation == id.generation).then_some(id.index)
    }

    /// Live nodes, roots too.
    pub fn live(&self) -> impl Iterator<Item = Index> + '_ {
        (0..self.nodes.len() as Index).filter(|&at| self.node(at).live)
    }

    /// Live nodes but the roots.
    pub fn count(&self) -> usize {
        self.live_count() - self.roots.len()
    }

    /// Live nodes, roots too.
    pub fn live_count(&self) -> usize {
        self.nodes.len() - self.vacant.len() - self.used_up
    }

    /// Nodes in the table of children.
    pub fn linked_count(&self) -> usize {
        self.children.len()
    }

    pub fn root_count(&self) -> usize {
        self.roots.len()
    }

    pub fn find_root(&self, namespace: &CacheNamespace) -> Option<Index> {
        self.roots.get(namespace).copied()
    }

    pub fn root_info(&self, at: Index) -> Option<&Root> {
        self.root_info.get(&at)
    }

    pub fn add_root(&mut self, namespace: &CacheNamespace) -> Index {
        let at = self.add(Node::new(NONE, 0, 0, Arc::default()));
        let tag = self.hasher.hash_one(namespace);
        self.roots.insert(namespace.clone(), at);
        self.root_info.insert(at, Root { namespace: namespace.clone(), seed: namespace.seed(), tag });
        at
    }

    /// Forgets the root of a namespace that holds nothing and that nobody locks.
    pub fn retire_root(&mut self, at: Index) {
        let node = self.node(at);
        if !node.live || !node.is_root() || node.children > 0 || node.full.locks > 0 {
            return;
        }
        if let Some(root) = self.root_info.remove(&at) {
            self.roots.remove(&root.namespace);
            self.vacate(at);
        }
    }

    pub fn add(&mut self, mut node: Node) -> Index {
        let root = (node.parent != NONE).then(|| self.node(node.parent).root);
        let at = match self.vacant.pop() {
            Some(at) => {
                node.generation = self.node(at).generation + 1;
                self.nodes[at as usize] = node;
                at
            }
            None => {
                self.nodes.push(node);
                (self.nodes.len() - 1) as Index
            }
        };
        self.node_mut(at).root = root.unwrap_or(at);
        at
    }

    /// Gives a place free. One whose names are used up is left alone for ever.
    pub fn vacate(&mut self, at: Index) {
        let node = self.node_mut(at);
        node.live = false;
        node.span = Arc::default();
        match node.generation < u32::MAX {
            true => self.vacant.push(at),
            false => self.used_up += 1,
        }
    }

    fn page<'a>(&self, span: &'a Span) -> &'a [u32] {
        let tokens = span.tokens();
        tokens.get(..self.first_page).unwrap_or(tokens)
    }

    /// What stands for a page that begins after `start` pages in a namespace, where nothing hangs on a clash.
    pub fn fingerprint(&self, root: Index, start: u32, page: &[u32]) -> u64 {
        self.hasher.hash_one((self.tag(root), start, page))
    }

    /// As `fingerprint`, for the first page of a sequence in any namespace.
    pub fn first_fingerprint(&self, page: &[u32]) -> u64 {
        self.hasher.hash_one(page)
    }

    /// Tells the namespace of a root apart in fingerprints.
    pub fn tag(&self, root: Index) -> u64 {
        self.root_info.get(&root).map_or(0, |root| root.tag)
    }

    /// The tokens by which a node is found.
    pub fn first_page_of(&self, at: Index) -> &[u32] {
        self.page(&self.node(at).span)
    }

    fn hash(&self, parent: Index, page: &[u32]) -> u32 {
        self.hasher.hash_one((parent, page)) as u32
    }

    /// The child of `parent` that begins as `tokens` do. None too if these make no page.
    pub fn find_child(&self, parent: Index, tokens: &[u32]) -> Option<Index> {
        if self.node(parent).children == 0 {
            return None;
        }
        let page = tokens.get(..self.first_page)?;
        let hash = self.hash(parent, page);
        let is_it = |entry: &Entry| {
            entry.hash == hash && {
                let node = self.node(entry.index);
                node.parent == parent && self.page(&node.span) == page
            }
        };
        self.children.find(Entry::spread(hash), is_it).map(|entry| entry.index)
    }

    /// Enters a node under its parent.
    pub fn link(&mut self, at: Index) {
        let parent = self.node(at).parent;
        let hash = self.hash(parent, self.page(&self.node(at).span));
        self.children.insert_unique(Entry::spread(hash), Entry { hash, index: at }, |entry| Entry::spread(entry.hash));
        let first = self.node(parent).first_child;
        if first != NONE {
            self.node_mut(first).previous_sibling = at;
        }
        let on_device = u32::from(self.node(at).full.on_device());
        let node = self.node_mut(at);
        node.next_sibling = first;
        node.previous_sibling = NONE;
        let parent = self.node_mut(parent);
        parent.first_child = at;
        parent.children += 1;
        parent.device_children += on_device;
    }

    /// Takes a node out from under its parent.
    pub fn unlink(&mut self, at: Index) {
        let node = self.node(at);
        let (parent, next, previous) = (node.parent, node.next_sibling, node.previous_sibling);
        let on_device = u32::from(node.full.on_device());
        let hash = self.hash(parent, self.page(&node.span));
        if let Ok(entry) = self.children.find_entry(Entry::spread(hash), |entry| entry.index == at) {
            entry.remove();
        }
        if next != NONE {
            self.node_mut(next).previous_sibling = previous;
        }
        if previous != NONE {
            self.node_mut(previous).next_sibling = next;
        }
        let parent = self.node_mut(parent);
        if parent.first_child == at {
            parent.first_child = next;
        }
        parent.children -= 1;
        parent.device_children -= on_device;
    }

    pub fn children(&self, at: Index) -> impl Iterator<Item = Index> + '_ {
        let first = Some(self.node(at).first_child).filter(|&child| child != NONE);
        std::iter::successors(first, |&child| Some(self.node(child).next_sibling).filter(|&next| next != NONE))
    }

    /// The node and those before it, the root left out.
    pub fn upward(&self, at: Index) -> impl Iterator<Item = Index> + '_ {
        let not_root = |at: &Index| !self.node(*at).is_root();
        std::iter::successors(Some(at).filter(not_root), move |&at| Some(self.node(at).parent).filter(not_root))
    }

    /// The parts, top down, of what was the node `tail` when it began at page `start`: it keeps its name when it is split.
    pub fn parts(&self, tail: Index, start: u32) -> Vec<Index> {
        let mut parts: Vec<Index> = self.upward(tail).take_while(|&at| self.node(at).start >= start).collect();
        parts.reverse();
        parts
    }

    /// Bytes of nodes, table, tokens, keys and full slots.
    pub fn bytes(&self) -> usize {
        let owned: usize = self
            .live()
            .map(|at| {
                let node = self.node(at);
                let span = size_of::<Span>() + 2 * size_of::<usize>() + size_of_val(node.span.tokens());
                span + node.span.known_keys().map_or(0, size_of_val)
                    + size_of_val(&*node.full.device)
                    + size_of_val(&*node.full.host)
            })
            .sum();
        owned + self.nodes.capacity() * size_of::<Node>() + self.children.allocation_size()
    }
}
