//! The C header is made from the types of the boundary: the committed one is compared with what they give now, and a C and a C++ compiler
//! must see the same sizes and offsets.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that can't go on fails")]

mod c_header {
    pub mod render;
}

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use c_header::render::{header, struct_name};
use kvdock_plugin_api::v0_1::TYPES;

#[test]
fn the_committed_header_is_what_the_types_give() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/kvdock_plugin.h");
    let now = header();
    if std::env::var_os("KVDOCK_BLESS").is_some() {
        std::fs::write(&path, &now).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    let line = committed.lines().zip(now.lines()).position(|(was, is)| was != is);
    assert!(
        committed == now,
        "plugin-api/include/kvdock_plugin.h is not what the types give (first difference: line {}). \
         KVDOCK_BLESS=1 cargo test -p kvdock-plugin-api --test header writes it anew.",
        line.map_or(committed.lines().count().min(now.lines().count()), |at| at) + 1,
    );
}

/// A file that asserts what the descriptions say.
fn assertions() -> String {
    let mut text = String::from("#include <stddef.h>\n#include \"kvdock_plugin.h\"\n");
    for ty in TYPES {
        let name = struct_name(ty.name);
        writeln!(text, "static_assert(sizeof({name}) == {}, \"size of {name}\");", ty.size).unwrap();
        for field in ty.fields {
            let at = format!("{name}.{}", field.name);
            writeln!(text, "static_assert(offsetof({name}, {}) == {}, \"{at}\");", field.name, field.offset).unwrap();
        }
    }
    text
}

fn compile(compiler: &str, standard: &str, source: &str, name: &str) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join(name);
    std::fs::write(&file, source).unwrap();
    std::fs::write(folder.path().join("kvdock_plugin.h"), header()).unwrap();
    let output = Command::new(compiler)
        .args([standard, "-fsyntax-only", "-Wall", "-Wextra", "-Wpedantic", "-Werror"])
        .arg(&file)
        .output()
        .unwrap_or_else(|error| panic!("{compiler} is needed for the tests of the header: {error}"));
    assert!(output.status.success(), "{compiler}: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_c_compiler_sees_the_same_layout() {
    let source = format!("#include <assert.h>\n{}", assertions());
    compile("cc", "-std=c11", &source, "layout.c");
}

#[test]
fn a_cpp_compiler_sees_the_same_layout() {
    compile("c++", "-std=c++17", &assertions(), "layout.cpp");
}
