//! Stop strings over text that comes in pieces.

/// Looks for stop strings; lets through what can no longer be part of one.
///
/// The match that ends first counts, of those that end together the longest, as if the text
/// came character by character: how it is cut into pieces changes nothing.
#[derive(Debug, Clone)]
pub(crate) struct StopMatcher {
    stops: Vec<String>,
    keep_match: bool,
    held: String,
}

/// What a piece of text led to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StopStep {
    /// Text that is now certain to be output.
    pub text: String,
    /// The stop string found; nothing may be pushed afterwards.
    pub matched: Option<String>,
}

impl StopMatcher {
    /// `keep_match` leaves the matched string in the text.
    pub fn new(stops: Vec<String>, keep_match: bool) -> Self {
        Self { stops, keep_match, held: String::new() }
    }

    /// Takes the next piece of text.
    pub fn push(&mut self, piece: &str) -> StopStep {
        if self.stops.is_empty() {
            return StopStep { text: piece.to_owned(), matched: None };
        }
        self.held.push_str(piece);
        let first = self
            .stops
            .iter()
            .filter_map(|stop| self.held.find(stop.as_str()).map(|at| (at + stop.len(), at, stop)))
            .min_by_key(|&(end, at, _)| (end, at));
        if let Some((end, at, stop)) = first {
            let matched = Some(stop.clone());
            let mut text = std::mem::take(&mut self.held);
            text.truncate(if self.keep_match { end } else { at });
            return StopStep { text, matched };
        }
        let keep = self.open_suffix();
        let tail = self.held.split_off(self.held.len() - keep);
        StopStep { text: std::mem::replace(&mut self.held, tail), matched: None }
    }

    /// Lets out what was held back and a piece in which no stop string is looked for. With an
    /// empty piece this ends the text.
    pub fn pass(&mut self, piece: &str) -> String {
        let mut text = std::mem::take(&mut self.held);
        text.push_str(piece);
        text
    }

    /// Bytes of the longest suffix of `held` that begins a stop string.
    fn open_suffix(&self) -> usize {
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let begin = self.held.len().saturating_sub(longest.saturating_sub(1));
        (begin..self.held.len())
            .filter_map(|at| self.held.get(at..))
            .find(|suffix| self.stops.iter().any(|stop| stop.starts_with(suffix)))
            .map_or(0, str::len)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn matcher(stops: &[&str]) -> StopMatcher {
        StopMatcher::new(stops.iter().map(|s| (*s).to_owned()).collect(), false)
    }

    fn run(matcher: &mut StopMatcher, pieces: &[&str]) -> (Vec<String>, Option<String>) {
        let mut texts = Vec::new();
        for piece in pieces {
            let step = matcher.push(piece);
            texts.push(step.text);
            if step.matched.is_some() {
                return (texts, step.matched);
            }
        }
        texts.push(matcher.pass(""));
        (texts, None)
    }

    #[test]
    fn a_stop_string_across_three_pieces() {
        let (texts, matched) = run(&mut matcher(&["</end>"]), &["text </", "en", "d> more"]);
        assert_eq!(texts, ["text ", "", ""]);
        assert_eq!(matched.as_deref(), Some("</end>"));
    }

    #[test]
    fn only_what_may_become_a_stop_string_is_held() {
        let (texts, matched) = run(&mut matcher(&["\n\nUser:"]), &["a\n", "\n", "b\n", "c"]);
        assert_eq!(texts, ["a", "", "\n\nb", "\nc", ""]);
        assert_eq!(matched, None);
    }

    #[test]
    fn the_end_gives_out_what_was_held() {
        let (texts, matched) = run(&mut matcher(&["STOP"]), &["xST", "O"]);
        assert_eq!(texts, ["x", "", "STO"]);
        assert_eq!(matched, None);
    }

    #[test]
    fn a_false_start_inside_a_start() {
        let (texts, matched) = run(&mut matcher(&["aab"]), &["a", "a", "a", "b"]);
        assert_eq!(texts.concat(), "a");
        assert_eq!(matched.as_deref(), Some("aab"));
    }

    #[test]
    fn the_match_that_ends_first_counts() {
        let (texts, matched) = run(&mut matcher(&["abcd", "bc"]), &["xabcd"]);
        assert_eq!((texts.concat().as_str(), matched.as_deref()), ("xa", Some("bc")));
        let (texts, matched) = run(&mut matcher(&["bc", "abc"]), &["xabc"]);
        assert_eq!((texts.concat().as_str(), matched.as_deref()), ("x", Some("abc")));
    }

    #[test]
    fn the_match_is_kept_on_request_and_the_rest_is_not() {
        let mut keeping = StopMatcher::new(vec!["。".to_owned()], true);
        let (texts, matched) = run(&mut keeping, &["好。再见"]);
        assert_eq!((texts.concat().as_str(), matched.as_deref()), ("好。", Some("。")));
    }

    proptest! {
        /// However the text is cut, the output is that of one character at a time.
        #[test]
        fn cutting_changes_nothing(
            text in "[ab鱼]{0,24}",
            stops in prop::collection::vec("[ab鱼]{1,4}", 1..4),
            cuts in prop::collection::vec(0usize..24, 0..6),
        ) {
            let characters: Vec<char> = text.chars().collect();
            let mut cuts: Vec<usize> =
                cuts.into_iter().filter(|&c| c <= characters.len()).collect();
            cuts.extend([0, characters.len()]);
            cuts.sort_unstable();
            let pieces: Vec<String> =
                cuts.windows(2).map(|w| characters[w[0]..w[1]].iter().collect()).collect();
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            let (texts, matched) = run(&mut StopMatcher::new(stops.clone(), false), &pieces);

            // Reference: the shortest beginning of the text that ends with a stop string.
            let hit = text.char_indices().map(|(at, c)| at + c.len_utf8()).find_map(|end| {
                stops
                    .iter()
                    .filter(|stop| text[..end].ends_with(stop.as_str()))
                    .max_by_key(|stop| stop.len())
                    .map(|stop| (end - stop.len(), stop.clone()))
            });
            match hit {
                Some((at, stop)) => {
                    prop_assert_eq!(texts.concat(), &text[..at]);
                    prop_assert_eq!(matched, Some(stop));
                }
                None => {
                    prop_assert_eq!(texts.concat(), text);
                    prop_assert_eq!(matched, None);
                }
            }
        }
    }
}
