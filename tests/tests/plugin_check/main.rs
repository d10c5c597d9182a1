//! `kvdock plugin check`: the shipped plugins pass, and whatever a plugin does is a line of the report.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod could_not;
mod stores;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use kvdock_tests::paths;
use quick_xml::Reader;
use quick_xml::events::{BytesStart, Event};

fn check(plugin: &Path, more: &[&str]) -> Output {
    Command::new(paths::kvdock()).args(["plugin", "check"]).arg(plugin).args(more).output().unwrap()
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn must_pass(plugin: &Path, more: &[&str]) -> String {
    let output = check(plugin, more);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));
    text(&output)
}

/// The line of a rule, with the lines that explain it.
fn line(output: &Output, rule: &str) -> String {
    let text = text(output);
    let mut lines =
        text.lines().skip_while(|line| line.split_whitespace().nth(1).map(|id| id.trim_end_matches(':')) != Some(rule));
    let first = lines.next().unwrap_or_else(|| panic!("no line for {rule} in {text}")).to_owned();
    lines.take_while(|line| line.starts_with(' ')).fold(first, |all, line| format!("{all}\n{line}"))
}

/// Builds the example in C with a fault that `defines` name.
fn c_plugin(defines: &[&str]) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().join("libplugin.so");
    let example = paths::workspace().join("examples/c-minimal");
    let source = paths::workspace().join("tests/tests/plugin_check/fault.c");
    let output = Command::new("cc")
        .args(["-std=gnu11", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread"])
        .args(defines)
        .arg("-I")
        .arg(&example)
        .arg("-I")
        .arg(paths::workspace().join("plugin-api/include"))
        .arg("-o")
        .arg(&library)
        .arg(source)
        .args([example.join("pools.c"), example.join("store.c")])
        .output()
        .unwrap_or_else(|error| panic!("cc is needed for this test: {error}"));
    assert!(output.status.success(), "{}", text(&output));
    (folder, library)
}

fn attribute(tag: &BytesStart<'_>, name: &str) -> Option<String> {
    tag.attributes().flatten().find(|attribute| attribute.key.as_ref() == name).map(|found| found.value.into_owned())
}

#[test]
fn the_file_plugin_passes_and_junit_says_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let junit = folder.path().join("report.xml");
    let printed = must_pass(&paths::file_plugin(), &["--junit", junit.to_str().unwrap()]);
    for rule in ["ok      life.other_process", "ok      life.killed", "ok      data.many_pages", "ok      load.file"] {
        assert!(printed.contains(rule), "{printed}");
    }
    let xml = std::fs::read_to_string(&junit).unwrap();
    let mut reader = Reader::from_str(&xml);
    let (mut cases, mut counts) = (Vec::new(), None);
    loop {
        match reader.read_event().unwrap() {
            Event::Start(tag) | Event::Empty(tag) if tag.name().as_ref() == "testcase" => {
                cases.push(attribute(&tag, "name").unwrap());
            }
            Event::Start(tag) if tag.name().as_ref() == "testsuite" => {
                counts = attribute(&tag, "tests").zip(attribute(&tag, "failures"));
            }
            Event::Eof => break,
            _ => {}
        }
    }
    let rules = printed.lines().filter(|line| line.starts_with("ok ") || line.starts_with("skipped ")).count();
    assert_eq!((cases.len(), counts), (rules, Some((rules.to_string(), "0".to_owned()))));
}

#[test]
fn the_file_plugin_passes_with_a_configuration_of_the_user() {
    let config = r#"{"dir":"{scratch}/deep/er","min_free_bytes":0,"io":"threads","durability":"none"}"#;
    must_pass(&paths::file_plugin(), &["--config", config]);
}

#[test]
fn a_crash_or_an_exit_is_a_finding_of_its_rule_and_not_the_end() {
    for (fault, seen) in [
        ("-DFAULT=abort()", "the process ended by signal 6 (SIGABRT)"),
        ("-DFAULT=exit(7)", "the process ended with exit code 7"),
    ] {
        let (_folder, library) = c_plugin(&[fault]);
        let output = check(&library, &["--rule", "status.", "--rule", "data.one_page"]);
        assert_eq!(output.status.code(), Some(1), "{}", text(&output));
        let flush = line(&output, "status.flush");
        assert!(flush.starts_with("FAILED") && flush.contains(seen) && flush.contains("expected"), "{flush}");
        assert!(flush.contains("noise of the plugin"), "what it printed is shown: {flush}");
        for other in ["status.stats", "status.health", "data.one_page"] {
            assert!(line(&output, other).starts_with("ok"), "{}", text(&output));
        }
        assert!(text(&output).contains("3 rules kept, 1 broken"), "{}", text(&output));
    }
}

#[test]
fn a_call_that_never_returns_is_a_finding_of_its_own_rule() {
    let (_folder, library) = c_plugin(&["-DFAULT=for (;;) pause()"]);
    let output = check(&library, &["--rule", "calls.hang", "--rule", "data.one_page"]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    let hang = line(&output, "calls.hang");
    assert!(hang.starts_with("FAILED") && hang.contains("flush returns"), "{hang}");
    assert!(line(&output, "data.one_page").starts_with("ok"), "{}", text(&output));
}

#[test]
fn a_plugin_that_prints_is_no_fault() {
    let (_folder, library) = c_plugin(&["-DFAULT=(void)0"]);
    let output = check(&library, &["--rule", "status.flush"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));
    assert!(!text(&output).contains("noise"), "{}", text(&output));
}

#[test]
fn a_library_that_does_not_survive_being_mapped_is_one_finding() {
    let (_folder, library) = c_plugin(&["-DCONSTRUCTOR=abort()"]);
    let output = check(&library, &[]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    assert!(line(&output, "load.maps").contains("SIGABRT"), "{}", text(&output));
    assert!(text(&output).contains("1 rules kept, 1 broken"), "{}", text(&output));
    assert!(line(&output, "data.one_page").contains("not run: load.maps is not kept"), "{}", text(&output));
}

#[test]
fn a_file_that_no_host_loads_breaks_its_rule_in_words() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("plugin.so");
    std::fs::write(&file, "no library\n").unwrap();
    let output = check(&file, &[]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    let refused = line(&output, "load.file");
    assert!(refused.starts_with("FAILED") && refused.contains("a text file"), "{refused}");
    let told = text(&output);
    assert!(told.contains("other rules were not run") && !told.contains("load.maps"), "{told}");
}

#[test]
fn what_could_not_be_run_exits_with_2_and_says_why() {
    let plugin = paths::file_plugin();
    let cases: [(&Path, &[&str], &str); 8] = [
        (Path::new("/nowhere/plugin.so"), &[], "/nowhere/plugin.so"),
        (Path::new("no-such-name"), &[], "no plugin named \"no-such-name\""),
        (&plugin, &["--config", "{"], "--config is no JSON"),
        (&plugin, &["--config", "[]"], "expected a JSON object"),
        (&plugin, &["--config", r#"{"dirs":"x"}"#], "dirs"),
        (&plugin, &["--rule", "date."], "no rule is named \"date.\""),
        (&plugin, &["--rule", ""], "--rule: expected the name of a rule"),
        (&plugin, &["--rule", "load.entry", "--junit", "/nowhere/report.xml"], "/nowhere/report.xml"),
    ];
    for (plugin, more, said) in cases {
        let output = check(plugin, more);
        assert_eq!(output.status.code(), Some(2), "{more:?}: {}", text(&output));
        assert!(text(&output).contains(said), "{more:?}: {}", text(&output));
    }
}

#[test]
fn a_name_in_the_search_path_will_do() {
    let output = check(Path::new("file"), &["--rule", "load."]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));
}

#[test]
fn the_rules_can_be_listed() {
    let output = Command::new(paths::kvdock()).args(["plugin", "check", "--list"]).output().unwrap();
    let listed = text(&output);
    assert!(output.status.success() && listed.lines().count() > 60, "{listed}");
    assert!(listed.contains("data.duplicate_keys") && listed.contains("linker."), "{listed}");
}
