//! Parts of texts that were tokenized before.
//!
//! Added tokens cut a text before anything else looks at it, so what stands between two of them is tokenized by itself, whatever is around
//! it. In a chat that is a message: the system's is that of all requests, and all but the last of a conversation came with the request before.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use aho_corasick::{AhoCorasick, MatchKind};

use super::length::keeps_all;

/// Bytes of texts and tokens that a generation holds; there are two.
const GENERATION: usize = 4 << 20;
/// A part that is longer is not kept: it would push out too many others.
const LONGEST: usize = 256 << 10;

/// What cuts texts, and the parts that are known.
pub(super) struct Pieces {
    marks: AhoCorasick,
    /// The token of each of the `marks`.
    ids: Vec<u32>,
    known: Mutex<Known>,
}

/// A part of a text.
#[derive(Debug, PartialEq, Eq)]
enum Piece<'a> {
    Added(u32),
    Text(&'a str),
}

impl Pieces {
    /// The parts of a tokenizer's texts; `None` where what stands around an added token matters, or parts can't be put together again.
    pub(super) fn of(tokenizer: &tokenizers::Tokenizer) -> Option<Self> {
        // Other steps may look at where in the text a part begins.
        let pre_tokenizer = serde_json::to_value(tokenizer.get_pre_tokenizer()).ok()?;
        let whole = keeps_all(&pre_tokenizer, 0)
            && tokenizer.get_truncation().is_none()
            && tokenizer.get_padding().is_none()
            && !tokenizer.get_encode_special_tokens();
        // Those that are looked for in normalized text are found within a part.
        let cutting: Vec<_> =
            tokenizer.get_added_tokens_decoder().into_iter().filter(|(_, token)| !token.normalized).collect();
        let plain = cutting
            .iter()
            .all(|(_, token)| !(token.content.is_empty() || token.single_word || token.lstrip || token.rstrip));
        if !whole || !plain || cutting.is_empty() {
            return None;
        }
        let marks = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(cutting.iter().map(|(_, token)| token.content.as_str()))
            .ok()?;
        Some(Self { marks, ids: cutting.into_iter().map(|(id, _)| id).collect(), known: Mutex::default() })
    }

    /// The tokens of a text, of which `tokenize` is asked for the parts that are not known.
    ///
    /// # Errors
    /// Those of `tokenize`.
    pub(super) fn encode<E>(&self, text: &str, tokenize: impl Fn(&str) -> Result<Vec<u32>, E>) -> Result<Vec<u32>, E> {
        let mut tokens = Vec::with_capacity(text.len() / 4);
        for piece in self.cut(text) {
            match piece {
                Piece::Added(id) => tokens.push(id),
                Piece::Text(text) => {
                    let known = self.known().get(text);
                    if let Some(known) = known {
                        tokens.extend_from_slice(&known);
                        continue;
                    }
                    let fresh = tokenize(text)?;
                    tokens.extend_from_slice(&fresh);
                    self.known().put(text, fresh);
                }
            }
        }
        Ok(tokens)
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The parts of a text, in order.
    fn cut<'a>(&self, text: &'a str) -> Vec<Piece<'a>> {
        let mut pieces = Vec::new();
        let mut rest = 0;
        let between = |from: usize, to: usize| text.get(from..to).filter(|part| !part.is_empty()).map(Piece::Text);
        for mark in self.marks.find_iter(text) {
            let Some(&id) = self.ids.get(mark.pattern().as_usize()) else { continue };
            pieces.extend(between(rest, mark.start()));
            pieces.push(Piece::Added(id));
            rest = mark.end();
        }
        pieces.extend(between(rest, text.len()));
        pieces
    }
}

/// Parts in two generations. When the younger one is full the older one goes, with all that nobody asked for meanwhile.
#[derive(Default)]
struct Known {
    young: HashMap<Box<str>, Arc<[u32]>>,
    old: HashMap<Box<str>, Arc<[u32]>>,
    /// Of the younger one.
    bytes: usize,
}

impl Known {
    fn get(&mut self, text: &str) -> Option<Arc<[u32]>> {
        if let Some(tokens) = self.young.get(text) {
            return Some(Arc::clone(tokens));
        }
        let (text, tokens) = self.old.remove_entry(text)?;
        self.keep(text, Arc::clone(&tokens));
        Some(tokens)
    }

    fn put(&mut self, text: &str, tokens: Vec<u32>) {
        if text.len() <= LONGEST {
            self.keep(text.into(), tokens.into());
        }
    }

    fn keep(&mut self, text: Box<str>, tokens: Arc<[u32]>) {
        let bytes = text.len() + size_of_val(&*tokens);
        if self.bytes + bytes > GENERATION {
            self.old = std::mem::take(&mut self.young);
            self.bytes = 0;
        }
        if self.young.insert(text, tokens).is_none() {
            self.bytes += bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use tokenizers::AddedToken;
    use tokenizers::models::bpe::BPE;

    use super::*;

    fn tokenizer(added: &[AddedToken]) -> tokenizers::Tokenizer {
        let mut tokenizer = tokenizers::Tokenizer::new(BPE::default());
        tokenizer.add_tokens(added.to_vec()).unwrap();
        tokenizer
    }

    fn added(text: &str) -> AddedToken {
        AddedToken::from(text, true).normalized(false)
    }

    #[test]
    fn the_leftmost_and_longest_tokens_cut_a_text() {
        let pieces = Pieces::of(&tokenizer(&[added("<a>"), added("<a><b>"), added("b>x")])).unwrap();
        let of = |text| pieces.cut(text);
        assert_eq!(of(""), []);
        assert_eq!(of("one"), [Piece::Text("one")]);
        assert_eq!(of("<a>"), [Piece::Added(0)]);
        assert_eq!(
            of("é<a>b<a><b>x"),
            [Piece::Text("é"), Piece::Added(0), Piece::Text("b"), Piece::Added(1), Piece::Text("x")]
        );
    }

    #[test]
    fn a_part_is_tokenized_once() {
        let pieces = Pieces::of(&tokenizer(&[added("<a>")])).unwrap();
        let asked = Cell::new(0);
        let encode = |text: &str| {
            let tokenize = |part: &str| {
                asked.set(asked.get() + 1);
                if part == "bad" { Err("no") } else { Ok(part.bytes().map(u32::from).collect()) }
            };
            pieces.encode(text, tokenize)
        };
        assert_eq!(encode("xy<a>z"), Ok(vec![120, 121, 0, 122]));
        assert_eq!(asked.get(), 2);
        assert_eq!(encode("z<a>xy<a>"), Ok(vec![122, 0, 120, 121, 0]));
        assert_eq!(asked.get(), 2);
        assert_eq!(encode("z<a>bad"), Err("no"));
        assert_eq!(encode("bad"), Err("no"));
        assert_eq!(asked.get(), 4, "an error is not kept");
    }

    #[test]
    fn tokens_that_look_around_them_cut_nothing() {
        for odd in [added("<a>").lstrip(true), added("<a>").rstrip(true), added("<a>").single_word(true)] {
            assert!(Pieces::of(&tokenizer(&[added("<b>"), odd])).is_none());
        }
        assert!(Pieces::of(&tokenizer(&[])).is_none());
        assert!(Pieces::of(&tokenizer(&[AddedToken::from("<a>", true).normalized(true)])).is_none());
        let mut cut = tokenizer(&[added("<a>")]);
        cut.with_truncation(Some(tokenizers::TruncationParams::default())).unwrap();
        assert!(Pieces::of(&cut).is_none());
    }

    #[test]
    fn what_is_kept_is_bounded_and_what_is_asked_for_stays() {
        let mut known = Known::default();
        known.put("asked for", vec![1]);
        let part = LONGEST / 8;
        for number in 0..GENERATION / part * 4 {
            known.put(&format!("{number:0part$}"), vec![2]);
            assert_eq!(known.get("asked for").as_deref(), Some(&[1][..]), "{number}");
            assert!(known.bytes <= GENERATION);
            let held: usize = known.young.keys().chain(known.old.keys()).map(|text| text.len()).sum();
            assert!(held <= 2 * GENERATION, "{held}");
        }
        assert_eq!(known.get(&format!("{:0part$}", 0)), None);
        known.put(&"x".repeat(LONGEST + 1), vec![3]);
        assert_eq!(known.get(&"x".repeat(LONGEST + 1)), None);
    }
}
