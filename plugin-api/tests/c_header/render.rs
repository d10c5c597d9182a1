//! Spells the types of the boundary in C.

use std::fmt::Write as _;

use kvdock_plugin_api::describe::{ConstWriter, Enumeration, Type};
use kvdock_plugin_api::note::{NOTE_OWNER, NOTE_SECTION, NOTE_TYPE};
use kvdock_plugin_api::v0_1::{ABI_VERSION, ENTRY_SYMBOL, ENUMERATIONS, NONE, TYPES, TYPES_DIGEST, TYPES_TEXT};

const TOP: &str = r#"/* kvdock's boundary to storage plugins, ABI version 0.1.
 *
 * Made from the Rust types of the crate kvdock-plugin-api; do not edit. What a plugin and a host promise each other stands in ABI.md,
 * a worked example in examples/c-minimal.
 *
 * - When a call returns, with any status, nothing that works for the plugin (thread, device, DMA engine, other process)
 *   touches the memory of that call again.
 * - Unless a field says otherwise, what a struct points at lives until the call returns. A pointer with a count of 0 may be null.
 *   Text is UTF-8 without a trailing zero.
 * - Destination pages of calls in flight are disjoint, and the host neither reads nor writes them; it does not write source pages.
 * - Data calls run concurrently, also with one key in two calls.
 * - `close` is called once, after every other call has returned. It stops the plugin's threads before it returns.
 * - No call unwinds and none longjmps out. Reserved fields are written 0 and not read.
 * - A function that the plugin does not offer is there all the same and answers KVDOCK_ERROR_KIND_UNSUPPORTED.
 */
#ifndef KVDOCK_PLUGIN_H
#define KVDOCK_PLUGIN_H

#include <stdint.h>

#ifdef __cplusplus
#define KVDOCK_EXTERN_C extern "C"
#else
#define KVDOCK_EXTERN_C
#endif
"#;

const NOTE: &str = r#"
/** JSON written without quotes around it: KVDOCK_JSON({"type": "object"}). */
#define KVDOCK_JSON(...) #__VA_ARGS__

/* The JSON object of a note. */
#define KVDOCK_NOTE_JSON(name, version, license, description, capabilities, config_schema, check_config) \
    "{\"note\":1,\"name\":\"" name "\",\"version\":\"" version "\",\"license\":\"" license "\"," \
    "\"description\":\"" description "\",\"abi\":[\"0.1\"],\"panic\":\"unwind\"," \
    "\"capabilities\":" capabilities ",\"config_schema\":" config_schema ",\"check_config\":" check_config "," \
    "\"types_sha256\":{\"0.1\":\"" KVDOCK_TYPES_SHA256_0_1 "\"},\"types\":{\"0.1\":" KVDOCK_TYPES_JSON_0_1 "}}"

#ifdef __cplusplus
#define KVDOCK_NOTE_ROOM(text) ((sizeof(text) + 3) / 4 * 4)
#else
/* The terminating zero of the text has no place in the section. */
#define KVDOCK_NOTE_ROOM(text) ((sizeof(text) + 2) / 4 * 4)
#endif

#define KVDOCK_NOTE_OF(text) \
    __attribute__((used, section("@SECTION@"), aligned(4))) static const struct { \
        uint32_t owner_bytes; \
        uint32_t text_bytes; \
        uint32_t type; \
        char owner[8]; \
        char json[KVDOCK_NOTE_ROOM(text)]; \
    } kvdock_note = {@OWNER_BYTES@, sizeof(text) - 1, @TYPE@, "@OWNER@", text}

/** Writes the note of a plugin, which the host reads before it loads the file. Used once, outside of functions. All arguments are string literals.
 *
 * `name` is what a configuration calls the plugin: lower-case letters, digits, `-` and `_`. `license` is an SPDX expression. `capabilities` is a JSON
 * object: `linker`, `ranges`, `remove`, `clear_namespace`, `clear_everything`, `durable`, `shared`, `checksums`, `logical_pools`,
 * `cuda_memory` and `held_pages` are true or false, and false when missing; `alignment`, `preferred_batch` and `concurrency` are
 * numbers. `config_schema` is the JSON Schema of the configuration, `check_config` a configuration to try the plugin with, in which
 * `{scratch}` stands for a fresh folder. KVDOCK_JSON saves the escapes.
 */
#define KVDOCK_PLUGIN_NOTE(name, version, license, description, capabilities, config_schema, check_config) \
    KVDOCK_NOTE_OF(KVDOCK_NOTE_JSON(name, version, license, description, capabilities, config_schema, check_config))

/** The entry of a plugin, which the plugin defines: the address of its table for an ABI version (a `kvdock_backend_table` for
 * KVDOCK_ABI_VERSION_0_1), or null. It has no other effect, and the table stays as it is for the life of the process.
 */
KVDOCK_EXTERN_C __attribute__((visibility("default"))) const void *@ENTRY@(uint32_t abi_version);

#endif
"#;

/// `NoSpace` in lower case with `_` between words.
fn snake(name: &str) -> String {
    let mut text = String::new();
    let mut last = None;
    for c in name.chars() {
        if c.is_uppercase() && last.is_some_and(|last: char| last.is_lowercase() || last.is_ascii_digit()) {
            text.push('_');
        }
        text.extend(c.to_lowercase());
        last = Some(c);
    }
    text
}

/// C name of a type.
pub fn struct_name(name: &str) -> String {
    format!("kvdock_{}", snake(name))
}

fn constant(enumeration: &str, value: &str) -> String {
    format!("KVDOCK_{}_{}", snake(enumeration), snake(value)).to_uppercase()
}

/// The canonical text of a type.
fn canonical(ty: &str) -> String {
    let mut writer = ConstWriter::<512>::new();
    writer.type_text(ty);
    let len = writer.len();
    String::from_utf8_lossy(&writer.into_bytes()[..len]).into_owned()
}

/// A declaration of `name` with a Rust type; an empty name gives a parameter.
fn declare(ty: &str, name: &str) -> String {
    if let Some(function) = ty.strip_prefix("unsafe extern \"C\" fn(") {
        let (arguments, result) = function.rsplit_once(')').expect("a function has an end");
        let arguments: Vec<_> = arguments.split(", ").map(|argument| declare(argument, "")).collect();
        let result = result.strip_prefix(" -> ").map_or("void ".to_owned(), |result| declare(result, "") + " ");
        return format!("{result}(*{name})({})", arguments.join(", "));
    }
    if let Some((element, count)) = ty.strip_suffix(']').and_then(|ty| ty.split_once('[')) {
        return format!("{}[{count}]", declare(element, name));
    }
    let (mut rest, mut stars, mut constant) = (ty, String::new(), "");
    loop {
        if let Some(target) = rest.strip_prefix("*const ") {
            (rest, constant) = (target, "const ");
        } else if let Some(target) = rest.strip_prefix("*mut ") {
            rest = target;
        } else {
            break;
        }
        stars.push('*');
    }
    assert!(constant.is_empty() || stars.len() == 1, "{ty}: a pointer to a constant pointer is not spelled here");
    let plain = match rest {
        "u8" => "uint8_t".to_owned(),
        "u32" => "uint32_t".to_owned(),
        "i32" => "int32_t".to_owned(),
        "u64" => "uint64_t".to_owned(),
        "f64" => "double".to_owned(),
        "c_void" => "void".to_owned(),
        own => {
            assert!(TYPES.iter().any(|ty| ty.name == own), "{own} is no type of the boundary");
            struct_name(own)
        }
    };
    let space = if stars.is_empty() && name.is_empty() { "" } else { " " };
    format!("{constant}{plain}{space}{stars}{name}")
}

/// A link of the Rust documentation as a C author reads it.
fn unlinked(line: &str) -> String {
    let mut text = String::new();
    let mut rest = line;
    while let Some((before, after)) = rest.split_once("[`") {
        let (link, after) = after.split_once("`]").expect("a link has an end");
        let mut parts = link.rsplit("::");
        let (name, parent) = (parts.next().unwrap_or(link), parts.next().unwrap_or_default());
        text.push_str(before);
        if let Some(parent) = ENUMERATIONS.iter().find(|e| e.name == parent) {
            assert!(parent.values.iter().any(|value| value.name == name), "{link} is no value");
            text.push_str(&constant(parent.name, name));
        } else if ENUMERATIONS.iter().any(|e| e.name == name) {
            text.push_str(&constant(name, "*"));
        } else if TYPES.iter().any(|ty| ty.name == name) {
            write!(text, "`{}`", struct_name(name)).unwrap();
        } else {
            assert_eq!(name, "NONE", "a link that has no C form");
            text.push_str("KVDOCK_NONE");
        }
        rest = after;
    }
    let text = text + rest;
    text.replace("`ErrorKind`", &constant("ErrorKind", "*")).replace("`ErrorOut`", "`kvdock_error_out`")
}

fn comment(out: &mut String, indent: &str, doc: &[&str]) {
    let lines: Vec<_> = doc.iter().map(|line| unlinked(line.trim())).collect();
    match lines.as_slice() {
        [] => {}
        [line] => writeln!(out, "{indent}/** {line} */").unwrap(),
        [first, rest @ ..] => {
            writeln!(out, "{indent}/** {first}").unwrap();
            for line in rest {
                writeln!(out, "{}", format!("{indent} * {line}").trim_end()).unwrap();
            }
            writeln!(out, "{indent} */").unwrap();
        }
    }
}

fn enumeration(out: &mut String, enumeration: &Enumeration) {
    out.push('\n');
    comment(out, "", enumeration.doc);
    writeln!(out, "enum {} {{", struct_name(enumeration.name)).unwrap();
    for value in enumeration.values {
        comment(out, "    ", value.doc);
        writeln!(out, "    {} = {},", constant(enumeration.name, value.name), value.number).unwrap();
    }
    // A comma after the last value is C99.
    out.push_str("};\n");
}

fn structure(out: &mut String, ty: &Type) {
    out.push('\n');
    comment(out, "", ty.doc);
    writeln!(out, "struct {} {{", struct_name(ty.name)).unwrap();
    for field in ty.fields {
        comment(out, "    ", field.doc);
        writeln!(out, "    {};", declare(&canonical(field.ty), field.name)).unwrap();
    }
    out.push_str("};\n");
}

/// The whole header.
pub fn header() -> String {
    let mut out = TOP.to_owned();
    writeln!(out, "\n/** Number of ABI version 0.1, as tables and the entry carry it. */").unwrap();
    writeln!(out, "#define KVDOCK_ABI_VERSION_0_1 {ABI_VERSION}u").unwrap();
    writeln!(out, "\n/** In place of an index: none. */\n#define KVDOCK_NONE {NONE}u").unwrap();
    ENUMERATIONS.iter().for_each(|one| enumeration(&mut out, one));
    for ty in TYPES.iter().filter(|ty| ty.fields.is_empty()) {
        out.push('\n');
        comment(&mut out, "", ty.doc);
        let name = struct_name(ty.name);
        match (ty.size, ty.align) {
            (size, 1) => writeln!(out, "typedef uint8_t {name}[{size}];").unwrap(),
            (4, 4) => writeln!(out, "typedef uint32_t {name};").unwrap(),
            other => panic!("{name}: no C form for {other:?}"),
        }
    }
    out.push('\n');
    let structs: Vec<_> = TYPES.iter().filter(|ty| !ty.fields.is_empty()).collect();
    for ty in &structs {
        let name = struct_name(ty.name);
        writeln!(out, "typedef struct {name} {name};").unwrap();
    }
    structs.iter().for_each(|ty| structure(&mut out, ty));

    out.push_str("\n/* The description of the types above, and its SHA-256. Both stand in the note of a plugin. */\n");
    out.push_str("#define KVDOCK_TYPES_SHA256_0_1 \"");
    TYPES_DIGEST.iter().for_each(|byte| write!(out, "{byte:02x}").unwrap());
    out.push_str("\"\n#define KVDOCK_TYPES_JSON_0_1 \\\n    \"\\\"\" \\\n");
    for line in TYPES_TEXT.lines() {
        // Once for JSON, and once more for C.
        writeln!(out, "    \"{}\\\\n\" \\", line.replace('"', "\\\\\\\"")).unwrap();
    }
    out.push_str("    \"\\\"\"\n");
    let note = NOTE.replace("@SECTION@", NOTE_SECTION).replace("@OWNER@", NOTE_OWNER).replace("@ENTRY@", ENTRY_SYMBOL);
    let bytes = (NOTE_OWNER.len() + 1).to_string();
    out + &note.replace("@OWNER_BYTES@", &bytes).replace("@TYPE@", &format!("{NOTE_TYPE:#x}u"))
}
