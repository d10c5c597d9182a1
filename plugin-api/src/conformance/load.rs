//! Rules of the entry, the tables and the note.

use std::ffi::c_void;

use super::bench::Bench;
use super::{Check, Rule, ensure};
use crate::v0_1::{ABI_VERSION, BackendTable};

pub(super) const RULES: &[Rule] = &[
    Rule::new(
        "load.entry",
        "1",
        "the entry answers the same table twice, and null for versions that it does not know",
        &[entry],
    ),
    Rule::new("load.table", "1", "the table has the size and version of 0.1, and every function is there", &[table]),
];

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
    // SAFETY: the entry answered a table of version 0.1, which has this many words, all of them integers or addresses.
    unsafe { std::slice::from_raw_parts(table.cast::<usize>(), words) }.to_vec()
}

fn table(bench: &Bench) -> Check {
    let address = (bench.subject.entry)(ABI_VERSION);
    ensure(!address.is_null(), "a table for version 0.1", || "null".to_owned())?;
    let size = std::mem::size_of::<BackendTable>();
    let words = words::<BackendTable>(address);
    ensure(words[0] == size, format!("a table of {size} bytes"), || format!("it says {}", words[0]))?;
    let version = words[1] as u32;
    ensure(version == ABI_VERSION, format!("a table of version {ABI_VERSION:#x}"), || format!("{version:#x}"))?;
    let fields = BackendTable::DESCRIPTION.fields.iter().filter(|field| field.ty.contains("fn"));
    for field in fields {
        let word = words[field.offset / std::mem::size_of::<usize>()];
        ensure(word != 0, format!("the table has the function {}", field.name), || "null".to_owned())?;
    }
    Ok(())
}
