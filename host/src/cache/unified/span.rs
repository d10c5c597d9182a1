//! The tokens of a node, shared with the operations that run on it.

use std::sync::{Arc, OnceLock};

use crate::cache::hash::{bigram_chain_keys, chain_keys};
use crate::plugin::backend::PageKey;

/// What a key is counted in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Units {
    /// Tokens.
    #[default]
    Tokens,
    /// Pairs of neighbouring tokens, as speculative decoding with a draft head over pairs needs: N tokens make N - 1 units.
    Bigrams,
}

impl Units {
    /// Units in `tokens` tokens.
    pub fn count(self, tokens: usize) -> usize {
        tokens.saturating_sub(self.overlap())
    }

    /// Tokens that a run of units reaches past its own length.
    pub(super) fn overlap(self) -> usize {
        match self {
            Units::Tokens => 0,
            Units::Bigrams => 1,
        }
    }

    /// Keys of the whole pages of `tokens` after `prior`.
    pub(super) fn keys(self, prior: Option<PageKey>, tokens: &[u32], page_size: usize) -> Vec<PageKey> {
        match self {
            Units::Tokens => chain_keys(prior, tokens, page_size),
            Units::Bigrams => {
                let pages = self.count(tokens.len()) / page_size;
                let whole = tokens.get(..pages * page_size + 1).unwrap_or_default();
                let ids: Vec<u64> = whole.iter().map(|&token| token.into()).collect();
                // Tokens of 32 bits are never out of range.
                bigram_chain_keys(prior, &ids, Some(page_size)).unwrap_or_default()
            }
        }
    }
}

/// Tokens of whole pages and, once somebody asked, their keys. Never changes: a node that is split gets two new spans, and
/// operations go on with the one they hold.
#[derive(Debug, Default)]
pub(super) struct Span {
    tokens: Box<[u32]>,
    keys: OnceLock<Box<[PageKey]>>,
}

impl Span {
    /// A span whose keys are not known yet.
    pub fn new(tokens: Box<[u32]>) -> Arc<Self> {
        Arc::new(Span { tokens, keys: OnceLock::new() })
    }

    /// A span with the keys of its pages.
    pub fn with_keys(tokens: Box<[u32]>, keys: &[PageKey]) -> Arc<Self> {
        Arc::new(Span { tokens, keys: OnceLock::from(Box::from(keys)) })
    }

    /// The tokens, with what the last unit reaches over.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The keys, if they were computed.
    pub fn known_keys(&self) -> Option<&[PageKey]> {
        self.keys.get().map(|keys| &**keys)
    }

    /// The two spans of a cut after `pages` pages.
    pub fn split(&self, pages: usize, page_size: usize, units: Units) -> (Arc<Span>, Arc<Span>) {
        let at = pages * page_size;
        let (head, tail) = (Box::from(&self.tokens[..at + units.overlap()]), Box::from(&self.tokens[at..]));
        match self.known_keys().and_then(|keys| keys.split_at_checked(pages)) {
            Some((first, rest)) => (Span::with_keys(head, first), Span::with_keys(tail, rest)),
            None => (Span::new(head), Span::new(tail)),
        }
    }

    /// These spans as one.
    pub fn join(spans: &[Arc<Span>], units: Units) -> Arc<Span> {
        let mut tokens = Vec::with_capacity(spans.iter().map(|span| span.tokens.len()).sum());
        for (place, span) in spans.iter().enumerate() {
            let skipped = if place == 0 { 0 } else { units.overlap() };
            tokens.extend_from_slice(span.tokens.get(skipped..).unwrap_or_default());
        }
        let keys: Option<Vec<&[PageKey]>> = spans.iter().map(|span| span.known_keys()).collect();
        match keys {
            Some(keys) => Span::with_keys(tokens.into(), &keys.concat()),
            None => Span::new(tokens.into()),
        }
    }
}

/// The way from the start of a sequence to a page, for computing keys off the thread that owns the tree. Keys are always anchored at
/// the start, whatever the tree looks like later.
#[derive(Debug, Clone, Default)]
pub struct KeyPath {
    pub(super) seed: Option<PageKey>,
    pub(super) spans: Vec<Arc<Span>>,
    pub(super) pages: usize,
    pub(super) page_size: usize,
    pub(super) units: Units,
}

impl KeyPath {
    /// Pages of the whole path.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Keys of all pages of the path, and of the whole pages of the tokens that come after it.
    pub fn keys_with(&self, rest: &[u32]) -> Vec<PageKey> {
        let mut keys = self.keys();
        let prior = keys.last().copied().or(self.seed);
        keys.extend(self.units.keys(prior, rest, self.page_size));
        keys
    }

    /// Keys of all pages of the path, in order. What is computed here is kept in the tree's nodes.
    pub fn keys(&self) -> Vec<PageKey> {
        let mut keys = Vec::with_capacity(self.pages);
        let mut prior = self.seed;
        for span in &self.spans {
            let of_span = span.keys.get_or_init(|| self.units.keys(prior, &span.tokens, self.page_size).into());
            prior = of_span.last().copied().or(prior);
            keys.extend_from_slice(of_span);
        }
        keys.truncate(self.pages);
        keys
    }
}
