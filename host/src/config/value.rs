//! The kinds of values a key takes, and the check of each.

use toml::Value;

use super::home::expanded;

/// What a key takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    /// Any text.
    Text,
    /// The path of a file or a folder.
    Path,
    /// Text that is never printed.
    Secret,
    /// `true` or `false`.
    Bool,
    /// An integer within bounds, both included.
    Int(i64, i64),
    /// An integer within bounds, or `"auto"`.
    IntOrAuto(i64, i64),
    /// A number within bounds, both included.
    Number(f64, f64),
    /// Bytes: an integer, or text such as `"10GiB"`; at least the bound.
    Size(u64),
    /// One of these words.
    Choice(&'static [&'static str]),
    /// A list of texts; a single text is a list of one.
    TextList,
    /// A list of folders; a single text is split at colons.
    PathList,
}

impl Kind {
    /// What the key takes, in words; ends sentences such as "takes ...".
    pub(crate) fn describe(&self) -> String {
        match self {
            Self::Text | Self::Secret => "text".into(),
            Self::Path => "a path; a leading ~/ is the home folder".into(),
            Self::Bool => "true or false".into(),
            Self::Int(low, high) => format!("an integer {}", bounds(*low, *high)),
            Self::IntOrAuto(low, high) => {
                format!("\"auto\" or an integer {}", bounds(*low, *high))
            }
            Self::Number(low, high) => format!("a number from {low} to {high}"),
            Self::Size(low) => {
                format!("bytes (at least {low}): an integer, or text such as \"10GiB\"")
            }
            Self::Choice(words) => {
                let quoted: Vec<_> = words.iter().map(|word| format!("\"{word}\"")).collect();
                match quoted.as_slice() {
                    [only] => only.clone(),
                    [rest @ .., last] => format!("{} or {last}", rest.join(", ")),
                    [] => "nothing".into(),
                }
            }
            Self::TextList => "a list of texts".into(),
            Self::PathList => {
                "a list of folders, or text with colons between them; a leading ~/ is the home folder".into()
            }
        }
    }

    /// Whether a value given as bare text (`--set`, environment) is text whatever it looks like.
    pub(crate) fn is_text(&self) -> bool {
        matches!(self, Self::Text | Self::Path | Self::Secret | Self::Choice(_))
    }

    /// Checks `value` and brings it into the one form that the typed structs read. `Err` says
    /// what the key takes.
    pub(crate) fn check(&self, value: &Value) -> Result<Value, String> {
        let refused = || self.describe();
        match (self, value) {
            (Self::Text | Self::Secret, Value::String(_)) | (Self::Bool, Value::Boolean(_)) => Ok(value.clone()),
            (Self::Int(low, high) | Self::IntOrAuto(low, high), Value::Integer(n)) if (low..=high).contains(&n) => {
                Ok(value.clone())
            }
            (Self::IntOrAuto(..), Value::String(text)) if text == "auto" => Ok(value.clone()),
            (Self::Number(low, high), Value::Integer(n)) => {
                let number = *n as f64;
                if (*low..=*high).contains(&number) { Ok(Value::Float(number)) } else { Err(refused()) }
            }
            (Self::Number(low, high), Value::Float(number)) if (low..=high).contains(&number) => Ok(value.clone()),
            (Self::Size(low), Value::Integer(n)) => match u64::try_from(*n) {
                Ok(bytes) if bytes >= *low => Ok(value.clone()),
                _ => Err(refused()),
            },
            (Self::Size(low), Value::String(text)) => match parse_size(text) {
                Some(bytes) if bytes >= *low => Ok(Value::Integer(i64::try_from(bytes).map_err(|_| refused())?)),
                _ => Err(refused()),
            },
            (Self::Choice(words), Value::String(text)) if words.contains(&text.as_str()) => Ok(value.clone()),
            (Self::Path, Value::String(text)) => path(text),
            (Self::TextList, Value::Array(items)) if items.iter().all(Value::is_str) => Ok(value.clone()),
            (Self::TextList, Value::String(text)) => Ok(Value::Array(vec![Value::String(text.clone())])),
            (Self::PathList, Value::Array(items)) => {
                let paths = items.iter().map(|item| item.as_str().ok_or_else(refused).and_then(path));
                paths.collect::<Result<_, _>>().map(Value::Array)
            }
            (Self::PathList, Value::String(text)) => {
                let paths = text.split(':').filter(|part| !part.is_empty()).map(path);
                paths.collect::<Result<_, _>>().map(Value::Array)
            }
            _ => Err(refused()),
        }
    }

    /// Nearest word of a choice to what was given, when it is near enough to be meant.
    pub(crate) fn nearest_choice(&self, value: &Value) -> Option<&'static str> {
        match (self, value) {
            (Self::Choice(words), Value::String(text)) => nearest(text, words.iter().copied()),
            _ => None,
        }
    }
}

/// A path, with the home folder in place of a leading `~`.
fn path(text: &str) -> Result<Value, String> {
    expanded(text).map(Value::String).ok_or_else(|| "a whole path here, as there is no home folder".to_owned())
}

fn bounds(low: i64, high: i64) -> String {
    if high == i64::MAX { format!("of at least {low}") } else { format!("from {low} to {high}") }
}

/// The candidate nearest to `text`, when near enough that it was probably meant.
pub(crate) fn nearest<'a>(text: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    candidates
        .into_iter()
        .filter_map(|candidate| {
            let edits = strsim::damerau_levenshtein(text, candidate);
            let alike = strsim::jaro_winkler(text, candidate);
            let near = edits <= 1 || alike > 0.75;
            near.then(|| (alike + strsim::normalized_damerau_levenshtein(text, candidate), candidate))
        })
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, candidate)| candidate)
}

/// Bytes in `text`: an integer with an optional unit, `KiB`, `MiB`, `GiB`, `TiB` (powers of
/// 1024), `kB`, `KB`, `MB`, `GB`, `TB` (powers of 1000) or `B`. `None` for anything else, and
/// for more than 2^63 - 1 bytes.
pub fn parse_size(text: &str) -> Option<u64> {
    let text = text.trim();
    let split = text.find(|c: char| !(c.is_ascii_digit() || c == '.' || c == '_')).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let scale: u64 = match unit.trim() {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        "TiB" => 1 << 40,
        "kB" | "KB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "TB" => 1_000_000_000_000,
        _ => return None,
    };
    let number = number.replace('_', "");
    let bytes = if number.contains('.') {
        let scaled = number.parse::<f64>().ok()? * scale as f64;
        // A fraction of a byte means that the unit was forgotten or is too small.
        (scaled.fract() == 0.0 && scaled < i64::MAX as f64).then_some(scaled as u64)?
    } else {
        number.parse::<u64>().ok()?.checked_mul(scale)?
    };
    i64::try_from(bytes).ok().map(|_| bytes)
}

/// `value` as it would stand in a config file, shortened when it is long.
pub(crate) fn show(value: &impl std::fmt::Display) -> String {
    let text = value.to_string();
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}...", text.get(..end).unwrap_or_default()),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(parse_size("10GiB"), Some(10 << 30));
        assert_eq!(parse_size("1.5 KiB"), Some(1536));
        assert_eq!(parse_size("1_000"), Some(1000));
        assert_eq!(parse_size("2MB"), Some(2_000_000));
        assert_eq!(parse_size("0"), Some(0));
        for bad in ["", "GiB", "10 gigs", "-1", "1.5", "0.3B", "9000000TiB", "1e3", "10 Gi"] {
            assert_eq!(parse_size(bad), None, "{bad}");
        }
    }

    #[test]
    fn bounds_are_inclusive() {
        let kind = Kind::Int(1, 3);
        assert!(kind.check(&Value::Integer(1)).is_ok());
        assert!(kind.check(&Value::Integer(3)).is_ok());
        assert_eq!(kind.check(&Value::Integer(4)).unwrap_err(), "an integer from 1 to 3");
        assert!(kind.check(&Value::String("2".into())).is_err());
        assert!(kind.check(&Value::Float(2.0)).is_err());
    }

    #[test]
    fn numbers_refuse_what_is_no_number() {
        let kind = Kind::Number(0.0, 10.0);
        assert_eq!(kind.check(&Value::Integer(3)), Ok(Value::Float(3.0)));
        assert!(kind.check(&Value::Float(f64::NAN)).is_err());
        assert!(kind.check(&Value::Float(f64::INFINITY)).is_err());
    }

    #[test]
    fn one_text_is_a_list() {
        let list = Kind::PathList.check(&Value::String("/a::/b".into()));
        assert_eq!(list, Ok(Value::Array(vec![Value::String("/a".into()), Value::String("/b".into())])));
        assert!(Kind::TextList.check(&Value::Integer(1)).is_err());
    }

    #[test]
    fn near_words_are_suggested() {
        let kind = Kind::Choice(&["lru", "lfu", "write_through"]);
        assert_eq!(kind.nearest_choice(&Value::String("write-thru".into())), Some("write_through"));
        assert_eq!(kind.nearest_choice(&Value::String("zebra".into())), None);
    }
}
