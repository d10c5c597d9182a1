//! Names of storage backends and of plugins.

/// Most bytes of a name, as of those in a plugin's note.
const MOST: usize = 64;

/// Checks the name of a backend or a plugin. A name is no path: it ends in metrics, logs and keys of the configuration.
///
/// # Errors
/// What a name takes, and what was found.
pub(crate) fn check_name(name: &str) -> Result<(), String> {
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'_' | b'-');
    if (1..=MOST).contains(&name.len()) && name.bytes().all(plain) {
        return Ok(());
    }
    let shown: String = name.chars().take(MOST).collect();
    let more = if shown.len() < name.len() { format!("... ({} bytes)", name.len()) } else { String::new() };
    Err(format!(
        "a name takes 1 to {MOST} of the characters a-z, 0-9, \"_\" and \"-\", and is never a path; found {shown:?}{more}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_could_be_of_any_length() {
        for good in ["file", "a_b-9", &"x".repeat(64)] {
            assert_eq!(check_name(good), Ok(()));
        }
        for bad in ["", "File", "a b", "/tmp/x.so", "x/../y", "\u{e4}"] {
            assert!(check_name(bad).unwrap_err().ends_with(&format!("found {bad:?}")), "{bad}");
        }
        let error = check_name(&"x".repeat(100_000)).unwrap_err();
        assert!(error.ends_with("... (100000 bytes)") && error.len() < 250, "{error}");
    }
}
