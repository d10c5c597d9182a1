//! Says in words how two descriptions of the boundary's types differ.

use std::collections::BTreeMap;

/// One type: size and alignment, and its fields in order.
struct Described<'a> {
    shape: (&'a str, &'a str),
    fields: Vec<&'a str>,
}

fn parse(text: &str) -> BTreeMap<&str, Described<'_>> {
    text.lines()
        .filter_map(|line| {
            let mut words = line.splitn(4, ' ');
            let (name, size, align) = (words.next()?, words.next()?, words.next()?);
            let fields = words.next().unwrap_or_default().split(';').filter(|f| !f.is_empty()).collect();
            Some((name, Described { shape: (size, align), fields }))
        })
        .collect()
}

/// Spells one field, `name:offset:size:type`, in words.
fn spell(field: &str) -> String {
    let mut parts = field.splitn(4, ':');
    match (parts.next(), parts.next(), parts.next(), parts.next()) {
        (Some(name), Some(offset), Some(size), Some(ty)) => {
            format!("{name}: {ty} ({size} bytes at {offset})")
        }
        _ => field.to_owned(),
    }
}

/// The first few differences between what is expected and what was found; none when there are none.
pub(super) fn difference(expected: &str, found: &str) -> Option<String> {
    const MOST: usize = 4;
    let (ours, theirs) = (parse(expected), parse(found));
    let mut words = Vec::new();
    for (name, our) in &ours {
        let Some(their) = theirs.get(name) else {
            words.push(format!("{name} is missing"));
            continue;
        };
        for index in 0..our.fields.len().max(their.fields.len()) {
            match (our.fields.get(index), their.fields.get(index)) {
                (Some(a), Some(b)) if a == b => {}
                (Some(a), Some(b)) => {
                    words.push(format!("{name}: expected {}, found {}", spell(a), spell(b)));
                    break;
                }
                (Some(a), None) => words.push(format!("{name}: expected {}, found no such field", spell(a))),
                (None, Some(b)) => words.push(format!("{name}: found one field more, {}", spell(b))),
                (None, None) => {}
            }
        }
        if our.shape != their.shape {
            let ((size, align), (their_size, their_align)) = (our.shape, their.shape);
            words.push(format!(
                "{name}: expected {size} bytes aligned to {align}, found {their_size} aligned to {their_align}"
            ));
        }
    }
    words.extend(theirs.keys().filter(|name| !ours.contains_key(*name)).map(|name| format!("{name} is not known")));
    if words.is_empty() {
        return None;
    }
    let more = words.len().saturating_sub(MOST);
    words.truncate(MOST);
    let mut text = words.join("; ");
    if more > 0 {
        text.push_str(&format!("; and {more} more"));
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::difference;

    #[test]
    fn a_changed_field_is_named_with_both_forms() {
        let text = difference("A 8 4 x:0:4:u32;y:4:4:u32\n", "A 16 8 x:0:4:u32;y:8:8:u64\n").unwrap();
        assert!(text.contains("A: expected y: u32 (4 bytes at 4), found y: u64 (8 bytes at 8)"), "{text}");
        assert!(text.contains("expected 8 bytes aligned to 4, found 16 aligned to 8"), "{text}");
    }

    #[test]
    fn equal_descriptions_have_no_difference() {
        assert_eq!(difference("A 8 4 x:0:4:u32\n", "A 8 4 x:0:4:u32\n"), None);
    }

    #[test]
    fn missing_and_unknown_types_are_named() {
        let text = difference("A 4 4 x:0:4:u32\n", "B 4 4 x:0:4:u32\n").unwrap();
        assert_eq!(text, "A is missing; B is not known");
    }
}
