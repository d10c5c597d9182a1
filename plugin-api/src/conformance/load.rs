//! Rules of the file, the entry, the tables and the note.

use std::ffi::c_void;

use super::bench::Bench;
use super::declared::with_scratch;
use super::{Check, Rule, Stop, ensure, fail};
use crate::v0_1::{ABI_VERSION, BackendTable, LinkerTable};

/// Keys below `storage.<name>` that the host takes for itself, for every backend. A plugin never sees them.
pub const HOST_KEYS: &[&str] = &[
    "plugin",
    "sha256",
    "key_scheme",
    "write_policy",
    "promote",
    "timeout",
    "retries",
    "concurrency",
    "read_bandwidth",
    "write_bandwidth",
    "drain_timeout",
];

/// A host may load the file.
pub(super) const FILE: &str = "load.file";

/// It can be mapped.
pub(super) const MAPS: &str = "load.maps";

pub(super) const RULES: &[Rule] = &[
    Rule::new(
        FILE,
        "2",
        "the file is a library for this machine with a note, an entry, the types of 0.1 and panics that unwind",
        &[file],
    ),
    Rule::new(MAPS, "2", "the library can be mapped, and its constructors return", &[maps]),
    Rule::new(
        "load.entry",
        "1",
        "the entry answers the same table twice, and null for versions that it does not know",
        &[entry],
    ),
    Rule::new("load.table", "1", "the tables have the size and version of 0.1, and every function is there", &[tables]),
    Rule::new(
        "load.linker_table",
        "6",
        "the linker table is there when the note declares it, and only then",
        &[linker_table],
    ),
    Rule::new("load.schema", "2", "the schema of the configuration is a JSON Schema of an object", &[schema]),
    Rule::new("load.check_config", "2", "the configuration for the suite fits the schema", &[check_config]),
    Rule::new("load.host_keys", "2", "the schema leaves the host's own keys to the host", &[host_keys]),
];

/// Looked at by the host, which sees the file.
fn file(_: &Bench) -> Check {
    Err(Stop::Skip("there is no file: the plugin is part of this program".to_owned()))
}

/// It was mapped, or this would not run.
fn maps(_: &Bench) -> Check {
    Ok(())
}

fn entry(bench: &Bench) -> Check {
    let entry = bench.subject.entry;
    let table = entry(ABI_VERSION);
    ensure(!table.is_null(), "a table for version 0.1", || "null".to_owned())?;
    ensure(entry(ABI_VERSION) == table, "the same table when it is asked again", || "another address".to_owned())?;
    for unknown in [0, 0x7fff_0001, u32::MAX] {
        ensure(entry(unknown).is_null(), format!("null for version {unknown:#x}, which nobody knows"), || {
            "an address".to_owned()
        })?;
    }
    ensure(entry(ABI_VERSION) == table, "the same table after other questions", || "another address".to_owned())
}

/// The table as words, so that a function that is missing can be seen.
fn words<T>(table: *const c_void) -> Vec<usize> {
    let words = std::mem::size_of::<T>() / std::mem::size_of::<usize>();
    // SAFETY: the plugin answered a table of version 0.1, which has this many words, all of them integers or addresses.
    unsafe { std::slice::from_raw_parts(table.cast::<usize>(), words) }.to_vec()
}

fn check_table<T>(address: *const c_void, described: &crate::describe::Type) -> Check<Vec<usize>> {
    let (name, size) = (described.name, std::mem::size_of::<T>());
    let words = words::<T>(address);
    ensure(words[0] == size, format!("{name} says that it has {size} bytes"), || format!("{}", words[0]))?;
    let version = words[1] as u32;
    ensure(version == ABI_VERSION, format!("{name} says version {ABI_VERSION:#x}"), || format!("{version:#x}"))?;
    for field in described.fields.iter().filter(|field| field.ty.contains("fn")) {
        let word = words[field.offset / std::mem::size_of::<usize>()];
        ensure(word != 0, format!("{name} has the function {}", field.name), || "null".to_owned())?;
    }
    Ok(words)
}

fn tables(bench: &Bench) -> Check {
    let address = (bench.subject.entry)(ABI_VERSION);
    ensure(!address.is_null(), "a table for version 0.1", || "null".to_owned())?;
    let words = check_table::<BackendTable>(address, &BackendTable::DESCRIPTION)?;
    let linker = words.last().copied().unwrap_or_default() as *const c_void;
    if !linker.is_null() {
        check_table::<LinkerTable>(linker, &LinkerTable::DESCRIPTION)?;
    }
    Ok(())
}

fn linker_table(bench: &Bench) -> Check {
    let address = (bench.subject.entry)(ABI_VERSION);
    ensure(!address.is_null(), "a table for version 0.1", || "null".to_owned())?;
    let there = words::<BackendTable>(address).last().is_some_and(|word| *word != 0);
    let declared = bench.declared().linker;
    let said = |yes: bool| if yes { "is there" } else { "is null" };
    ensure(there == declared, format!("a table whose linker {}, as the note declares", said(declared)), || {
        format!("it {}", said(there))
    })
}

fn schema(bench: &Bench) -> Check {
    let schema = &bench.subject.declared.config_schema;
    ensure(schema.is_object(), "a schema that is a JSON object", || schema.to_string())?;
    if let Err(error) = jsonschema::validator_for(schema) {
        return fail("a schema that is JSON Schema", error.to_string());
    }
    let kind = schema.get("type");
    ensure(kind.is_none_or(|kind| kind == "object"), "a schema whose type is \"object\"", || format!("{kind:?}"))
}

fn check_config(bench: &Bench) -> Check {
    let declared = &bench.subject.declared;
    let config = with_scratch(&declared.check_config, &bench.scratch.to_string_lossy());
    ensure(config.is_object(), "a check configuration that is a JSON object", || config.to_string())?;
    let Ok(validator) = jsonschema::validator_for(&declared.config_schema) else {
        return Err(Stop::Skip("the schema is none".to_owned()));
    };
    let wrong: Vec<String> = validator.iter_errors(&config).map(|error| error.to_string()).collect();
    ensure(wrong.is_empty(), format!("{config} fits the schema"), || wrong.join("; "))
}

fn host_keys(bench: &Bench) -> Check {
    let properties = bench.subject.declared.config_schema.get("properties").and_then(|value| value.as_object());
    let taken: Vec<&str> =
        HOST_KEYS.iter().copied().filter(|key| properties.is_some_and(|own| own.contains_key(*key))).collect();
    ensure(taken.is_empty(), "a schema without keys that the host takes for itself", || taken.join(", "))
}
