//! How long the tests run that go on for a while.

/// How many times longer than usual: the whole number in `KVDOCK_SOAK`; 1 when it is not set.
/// `cargo xtask soak` sets it.
pub fn factor() -> u32 {
    read(std::env::var("KVDOCK_SOAK").ok().as_deref())
}

fn read(value: Option<&str>) -> u32 {
    let Some(text) = value else { return 1 };
    match text.parse() {
        Ok(factor) if factor >= 1 => factor,
        _ => panic!("KVDOCK_SOAK={text:?}: takes a whole number of at least 1"),
    }
}

#[cfg(test)]
mod tests {
    use super::read;

    #[test]
    fn unset_is_one() {
        assert_eq!(read(None), 1);
        assert_eq!(read(Some("7")), 7);
    }

    #[test]
    #[should_panic(expected = "takes a whole number")]
    fn zero_is_refused() {
        read(Some("0"));
    }
}
