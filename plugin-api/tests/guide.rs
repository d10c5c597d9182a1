//! The code in GUIDE.md is the example in examples/rust-minimal to the letter, and that example works.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that can't go on fails")]

#[path = "../../examples/rust-minimal/src/lib.rs"]
mod example;

use std::path::Path;

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The code blocks of a language in the guide.
fn blocks(language: &str) -> Vec<String> {
    let guide = read("GUIDE.md");
    let fence = format!("```{language}\n");
    guide.split(&fence).skip(1).map(|rest| rest.split("```\n").next().unwrap().to_owned()).collect()
}

#[test]
fn the_code_of_the_guide_is_the_example() {
    assert_eq!(blocks("rust").join("\n"), read("../examples/rust-minimal/src/lib.rs"));
}

#[test]
fn the_manifest_of_the_guide_is_the_example() {
    assert_eq!(blocks("toml").first(), Some(&read("../examples/rust-minimal/Cargo.toml")));
}

#[test]
fn the_example_exports_a_plugin() {
    let table = kvdock_plugin_api::mock::table_of(example::kvdock_plugin_entry).unwrap();
    assert!(table.linker.is_null());
}
