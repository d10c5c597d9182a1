//! Keeps `KNOWN_FAILURES.md` true: every test that it names exists.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// The names of all functions marked as tests below `folder`.
fn collect(folder: &Path, names: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() {
            if name != "target" && !name.starts_with('.') {
                collect(&path, names);
            }
        } else if name.ends_with(".rs") {
            let text = fs::read_to_string(&path).unwrap();
            let mut is_test = false;
            for line in text.lines().map(str::trim) {
                if line.starts_with("#[test]") || line.starts_with("#[tokio::test") {
                    is_test = true;
                } else if let Some(rest) = line.trim_start_matches("async ").strip_prefix("fn ") {
                    if is_test {
                        names.extend(rest.split('(').next().map(str::to_owned));
                    }
                    is_test = false;
                }
            }
        }
    }
}

#[test]
fn known_failures_name_tests_that_exist() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut names = BTreeSet::new();
    collect(here.parent().unwrap(), &mut names);
    let page = fs::read_to_string(here.join("KNOWN_FAILURES.md")).unwrap();
    let named: Vec<&str> =
        page.lines().filter(|l| l.starts_with("| ")).flat_map(|l| l.split('`').skip(1).step_by(2)).collect();
    assert!(named.len() > 50, "the page names {} tests", named.len());
    let missing: Vec<&str> = named.into_iter().filter(|name| !names.contains(*name)).collect();
    assert!(missing.is_empty(), "KNOWN_FAILURES.md names tests that do not exist: {missing:?}");
}

#[test]
fn the_cases_of_linker_mode_name_tests_that_exist() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut names = BTreeSet::new();
    collect(here.parent().unwrap(), &mut names);
    let page = fs::read_to_string(here.join("CASES_LINKER.md")).unwrap();
    let rows = || page.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| case"));
    // Paths and settings stand in the same marks as names of tests.
    let is_name = |text: &&str| !text.contains(['/', ' ', ':', '=']) && text.contains('_');
    let named: Vec<&str> = rows().flat_map(|line| line.split('`').skip(1).step_by(2)).filter(is_name).collect();
    assert!(named.len() > 30, "the page names {} tests", named.len());
    let exists = |name: &str| match name.strip_suffix("...") {
        Some(start) => names.iter().any(|test| test.starts_with(start)),
        None => names.contains(name),
    };
    let helpers = ["check_integrity", "begin_store"];
    let missing: Vec<&str> = named.into_iter().filter(|name| !exists(name) && !helpers.contains(name)).collect();
    assert!(missing.is_empty(), "CASES_LINKER.md names tests that do not exist: {missing:?}");
    for number in 1..=40 {
        let case = format!("L{number:02}");
        assert!(rows().any(|line| line.contains(&case)), "{case} has no row");
    }
    for number in 1..=20 {
        let gap = format!("G{number}");
        assert!(rows().any(|line| line.contains(&gap)), "{gap} has no row");
    }
}
