//! A released version of the boundary is frozen: its types are compared with a dump in the tree, and with what abi_stable says of them.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that can't go on fails")]

use std::fmt::Write as _;
use std::path::Path;

use abi_stable::StableAbi;
use abi_stable::type_layout::TypeLayout;
use kvdock_plugin_api::v0_1::*;

const DUMP: &str = "layouts/v0_1.txt";

/// Types and enumerations as text, one line a field or value.
fn dump() -> String {
    let mut text =
        String::from("# Types of ABI version 0.1: name, bytes, alignment; then per field offset, bytes, name, type.\n");
    for ty in TYPES {
        writeln!(text, "\n{} {} {}", ty.name, ty.size, ty.align).unwrap();
        for field in ty.fields {
            writeln!(text, "    {:>3} {:>3} {}: {}", field.offset, field.size, field.name, type_text(field.ty))
                .unwrap();
        }
    }
    text.push_str("\n# Enumerations: name, integer type; then number and name.\n");
    for enumeration in ENUMERATIONS {
        writeln!(text, "\n{} {}", enumeration.name, enumeration.raw).unwrap();
        for value in enumeration.values {
            writeln!(text, "    {:>4} {}", value.number, value.name).unwrap();
        }
    }
    text.push_str("\n# SHA-256 of the description of the types, as it stands in the note of a plugin.\n\n");
    TYPES_DIGEST.iter().for_each(|byte| write!(text, "{byte:02x}").unwrap());
    text.push('\n');
    text
}

fn type_text(ty: &str) -> String {
    let mut writer = kvdock_plugin_api::describe::ConstWriter::<256>::new();
    writer.type_text(ty);
    let len = writer.len();
    String::from_utf8(writer.into_bytes()[..len].to_vec()).unwrap()
}

#[test]
fn the_types_of_0_1_are_those_of_the_dump() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(DUMP);
    let now = dump();
    if std::env::var_os("KVDOCK_BLESS").is_some() {
        std::fs::write(&path, &now).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap();
    if committed != now {
        let changed = committed.lines().zip(now.lines()).find(|(was, is)| was != is);
        let (was, is) = changed.unwrap_or(("(the dump ends)", "(or the types do)"));
        panic!(
            "the types of ABI version 0.1 differ from plugin-api/{DUMP}: it has\n  {was}\nthe source has\n  {is}\n\
             A released version is frozen: plugins built against it are out there. Undo the change, or make a new version \
             in a module beside v0_1 (see ABI.md). Before the release of 0.1, KVDOCK_BLESS=1 rewrites the dump."
        );
    }
}

/// What `#[repr(C)]` makes of a struct with fields of these sizes and alignments.
fn repr_c(fields: impl Iterator<Item = (usize, usize)>) -> (Vec<usize>, usize, usize) {
    let (mut offsets, mut end, mut most) = (Vec::new(), 0usize, 1);
    for (size, align) in fields {
        let offset = end.next_multiple_of(align);
        offsets.push(offset);
        end = offset + size;
        most = most.max(align);
    }
    (offsets, end.next_multiple_of(most), most)
}

#[test]
fn abi_stable_sees_the_same_types() {
    let layouts: &[&'static TypeLayout] = &[
        Bytes::LAYOUT,
        ErrorOut::LAYOUT,
        CallContext::LAYOUT,
        Identity::LAYOUT,
        CapabilitiesOut::LAYOUT,
        OpenArgs::LAYOUT,
        HostTable::LAYOUT,
        Region::LAYOUT,
        Segment::LAYOUT,
        Component::LAYOUT,
        PoolDesc::LAYOUT,
        PoolQuery::LAYOUT,
        ExistsArgs::LAYOUT,
        PoolTransfer::LAYOUT,
        BatchArgs::LAYOUT,
        HeldPages::LAYOUT,
        Stats::LAYOUT,
        HealthOut::LAYOUT,
        BackendTable::LAYOUT,
        LoadArgs::LAYOUT,
        StartArgs::LAYOUT,
        FinishArgs::LAYOUT,
        ReadyHandle::LAYOUT,
        OffloadArgs::LAYOUT,
        OffloadDone::LAYOUT,
        LinkerTable::LAYOUT,
    ];
    let described: Vec<_> = TYPES.iter().filter(|ty| !ty.fields.is_empty()).collect();
    assert_eq!(layouts.len(), described.len());
    for (layout, ty) in layouts.iter().zip(described) {
        assert_eq!(layout.name(), ty.name);
        assert_eq!((layout.size(), layout.alignment()), (ty.size, ty.align), "{}", ty.name);
        let fields = layout.get_fields().expect("a struct has fields").to_vec();
        let names: Vec<_> = fields.iter().map(|field| field.name()).collect();
        assert_eq!(names, ty.fields.iter().map(|field| field.name).collect::<Vec<_>>(), "{}", ty.name);
        // abi_stable knows sizes and alignments of the fields, not their offsets: those follow from the rules of C.
        let shapes = fields.iter().map(|field| (field.layout().size(), field.layout().alignment()));
        let (offsets, size, align) = repr_c(shapes);
        assert_eq!((size, align), (ty.size, ty.align), "{}", ty.name);
        for ((field, seen), offset) in ty.fields.iter().zip(&fields).zip(offsets) {
            let (name, seen) = (field.name, seen.layout().size());
            assert_eq!((field.offset, field.size), (offset, seen), "{}.{name}", ty.name);
        }
    }
}

#[test]
fn no_type_has_padding() {
    // Padding would carry whatever lay in memory, and a later field in it would not be noticed.
    for ty in TYPES.iter().filter(|ty| !ty.fields.is_empty()) {
        let mut end = 0;
        for field in ty.fields {
            assert_eq!(field.offset, end, "{}.{} follows padding", ty.name, field.name);
            end += field.size;
        }
        assert_eq!(end, ty.size, "{} ends with padding", ty.name);
    }
}

/// What stands after `before` in the sources, up to the first character that no name has.
fn names_after(before: &str, files: &[&str]) -> Vec<String> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut names = Vec::new();
    for file in files {
        let text = std::fs::read_to_string(source.join(file)).unwrap();
        for (at, _) in text.match_indices(before) {
            let rest = &text[at + before.len()..];
            names.push(rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect());
        }
    }
    names
}

#[test]
fn no_type_or_enumeration_is_forgotten() {
    let files = ["v0_1/args.rs", "v0_1/linker.rs", "v0_1/memory.rs", "v0_1/table.rs", "v0_1/mod.rs"];
    let mut structs = names_after("pub struct ", &files);
    assert!(structs.len() > 20, "{structs:?}");
    structs.extend(["PageKey".to_owned(), "Status".to_owned()]);
    for name in &structs {
        assert!(TYPES.iter().any(|ty| ty.name == *name), "{name} is missing in TYPES");
    }
    assert_eq!(structs.len(), TYPES.len());

    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut enumerations = 0;
    for file in ["kinds.rs", "error.rs"] {
        let text = std::fs::read_to_string(source.join(file)).unwrap();
        enumerations += text.matches("\nwire_enum! {").count();
    }
    assert_eq!(enumerations, ENUMERATIONS.len(), "an enumeration is missing in ENUMERATIONS");
}
