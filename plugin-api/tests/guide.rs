//! The code in GUIDE.md is the example in examples/redb to the letter. That the example builds and passes the check is tested in
//! tests/tests/authors.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that can't go on fails")]

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

/// Fails at the first line that differs.
fn assert_same(guide: &str, example: &str, file: &str) {
    for (number, (guide, example)) in guide.lines().zip(example.lines()).enumerate() {
        assert_eq!(guide, example, "line {} of {file} (right) is another in the guide (left)", number + 1);
    }
    assert_eq!(guide, example, "{file}: the guide (left) ends elsewhere");
}

#[test]
fn the_code_of_the_guide_is_the_example() {
    assert_same(&blocks("rust").join("\n"), &read("../examples/redb/src/lib.rs"), "examples/redb/src/lib.rs");
}

#[test]
fn the_manifest_of_the_guide_is_the_example() {
    let manifest = read("../examples/redb/Cargo.toml");
    assert_same(&blocks("toml")[0], &manifest, "examples/redb/Cargo.toml");
}

#[test]
fn the_headings_that_the_guide_links_to_are_there() {
    let guide = read("GUIDE.md");
    let anchor = |heading: &str| -> String {
        let kept =
            heading.to_lowercase().chars().filter(|c| c.is_alphanumeric() || " -".contains(*c)).collect::<String>();
        kept.replace(' ', "-")
    };
    let anchors: Vec<String> = guide.lines().filter_map(|line| line.strip_prefix("## ")).map(anchor).collect();
    let links: Vec<&str> = guide.split("](#").skip(1).map(|rest| rest.split(')').next().unwrap()).collect();
    assert!(links.len() > 10);
    for link in links {
        assert!(anchors.iter().any(|anchor| anchor == link), "no heading for #{link} in {anchors:?}");
    }
}
