//! The tokens of a node, shared with the operations that run on it.

use std::sync::{Arc, OnceLock};

use crate::cache::hash::chain_keys;
use crate::plugin::backend::PageKey;

/// Tokens of whole pages and, once somebody asked, their keys. Never changes: a node that is split
/// gets two new spans, and operations go on with the one they hold.
#[derive(Debug, Default)]
pub(crate) struct Span {
    tokens: Box<[u32]>,
    keys: OnceLock<Box<[PageKey]>>,
}

impl Span {
    /// A span whose keys are not known yet.
    pub fn new(tokens: &[u32]) -> Arc<Self> {
        Arc::new(Span { tokens: tokens.into(), keys: OnceLock::new() })
    }

    /// A span with the keys of its pages.
    pub fn with_keys(tokens: &[u32], keys: &[PageKey]) -> Arc<Self> {
        let span = Span { tokens: tokens.into(), keys: OnceLock::new() };
        // A fresh cell takes the first value.
        let _ = span.keys.set(keys.into());
        Arc::new(span)
    }

    /// The tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The keys, if they were computed.
    pub fn known_keys(&self) -> Option<&[PageKey]> {
        self.keys.get().map(|keys| &**keys)
    }

    /// The two spans of a cut after `pages` pages.
    pub fn split(&self, pages: usize, page_size: usize) -> (Arc<Span>, Arc<Span>) {
        let (head, tail) = self.tokens.split_at(pages * page_size);
        match self.known_keys().and_then(|keys| keys.split_at_checked(pages)) {
            Some((first, rest)) => (Span::with_keys(head, first), Span::with_keys(tail, rest)),
            None => (Span::new(head), Span::new(tail)),
        }
    }

    /// This span followed by `tail`.
    pub fn join(&self, tail: &Span) -> Arc<Span> {
        let tokens = [&*self.tokens, &*tail.tokens].concat();
        match (self.known_keys(), tail.known_keys()) {
            (Some(first), Some(rest)) => Span::with_keys(&tokens, &[first, rest].concat()),
            _ => Span::new(&tokens),
        }
    }

    fn keys_after(&self, prior: Option<PageKey>, page_size: usize) -> &[PageKey] {
        self.keys.get_or_init(|| chain_keys(prior, &self.tokens, page_size).into())
    }
}

/// The way from the start of a sequence to a page, for computing keys off the scheduler's thread.
/// Keys are always anchored at the start, whatever the tree looks like later.
#[derive(Debug, Clone, Default)]
pub(crate) struct KeyPath {
    /// Seed of the namespace.
    pub seed: Option<PageKey>,
    /// Spans in order, and the pages of the last one that count.
    pub spans: Vec<Arc<Span>>,
    /// Pages of the whole path.
    pub pages: usize,
}

impl KeyPath {
    /// Keys of all pages of the path.
    pub fn keys(&self, page_size: usize) -> Vec<PageKey> {
        let mut keys = Vec::with_capacity(self.pages);
        let mut prior = self.seed;
        for span in &self.spans {
            let of_span = span.keys_after(prior, page_size);
            prior = of_span.last().copied().or(prior);
            keys.extend_from_slice(of_span);
        }
        keys.truncate(self.pages);
        keys
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_do_not_depend_on_where_nodes_were_cut() {
        let tokens: Vec<u32> = (0..32).collect();
        let whole = chain_keys(None, &tokens, 4);
        let span = Span::new(&tokens);
        let (head, tail) = span.split(3, 4);
        let path = KeyPath { seed: None, spans: vec![head.clone(), tail.clone()], pages: 8 };
        assert_eq!(path.keys(4), whole);
        let (a, b) = tail.split(2, 4);
        assert_eq!(a.known_keys(), Some(&whole[3..5]), "known keys are cut with the tokens");
        assert_eq!(a.join(&b).known_keys(), Some(&whole[3..]));
        let part = KeyPath { seed: None, spans: vec![head, a], pages: 4 };
        assert_eq!(part.keys(4), whole[..4]);
    }
}
