//! The note: what a plugin says of itself in an ELF section, readable before any of its code runs.
//!
//! Section `.note.kvdock` holds one ELF note with the owner `kvdock`, the type [`NOTE_TYPE`] and a JSON object as
//! descriptor. Keys: `note` (1), `name`, `version`, `license`, `description`, `abi` (list of versions), `panic` (`unwind` or `abort`),
//! `capabilities`, `config_schema` (JSON Schema of the configuration), `check_config` (the configuration the conformance
//! suite uses; `{scratch}` stands for a fresh folder), `types` (object: version to the description of its types, one line
//! a type) and `types_sha256` (object: version to the digest of that text).

use crate::describe::ConstWriter;
use crate::{Capability, v0_1};

/// Name of the ELF section.
pub const NOTE_SECTION: &str = ".note.kvdock";
/// Owner of the note.
pub const NOTE_OWNER: &str = "kvdock";
/// Type of the note.
pub const NOTE_TYPE: u32 = 0x6b76_6463;

/// What a backend can do, and what suits it. In the note it says what instances may be able to do; an instance may do less.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// It has the linker face.
    pub linker: bool,
    /// Reads may name a range of layers.
    pub ranges: bool,
    /// `batch_remove` works.
    pub remove: bool,
    /// `clear` works for the namespace.
    pub clear_namespace: bool,
    /// `clear` works for everything.
    pub clear_everything: bool,
    /// What is stored is there for the next process once `flush` or `close` has returned. A power cut is not meant.
    pub durable: bool,
    /// What is stored can be read by other hosts.
    pub shared: bool,
    /// It verifies checksums of its own.
    pub checksums: bool,
    /// It takes logical pools, by marker objects.
    pub logical_pools: bool,
    /// It takes CUDA device memory.
    pub cuda_memory: bool,
    /// It wants to hear which pages the worker itself holds.
    pub held_pages: bool,
    /// Alignment of addresses and lengths that avoids a copy, in bytes; 1 for none.
    pub alignment: u32,
    /// Pages a call that suit it best.
    pub preferred_batch: u32,
    /// Data calls at a time that suit it best; the host makes no more.
    pub concurrency: u32,
}

impl Capabilities {
    /// A backend that can do nothing special.
    pub const NONE: Capabilities = Capabilities {
        linker: false,
        ranges: false,
        remove: false,
        clear_namespace: false,
        clear_everything: false,
        durable: false,
        shared: false,
        checksums: false,
        logical_pools: false,
        cuda_memory: false,
        held_pages: false,
        alignment: 1,
        preferred_batch: 128,
        concurrency: 4,
    };

    const fn flags(&self) -> [(Capability, bool); 11] {
        [
            (Capability::Linker, self.linker),
            (Capability::Ranges, self.ranges),
            (Capability::Remove, self.remove),
            (Capability::ClearNamespace, self.clear_namespace),
            (Capability::ClearEverything, self.clear_everything),
            (Capability::Durable, self.durable),
            (Capability::Shared, self.shared),
            (Capability::Checksums, self.checksums),
            (Capability::LogicalPools, self.logical_pools),
            (Capability::CudaMemory, self.cuda_memory),
            (Capability::HeldPages, self.held_pages),
        ]
    }

    /// As they cross the boundary.
    pub fn raw(&self) -> v0_1::CapabilitiesOut {
        v0_1::CapabilitiesOut {
            flags: self.flags().iter().filter(|(_, on)| *on).map(|(capability, _)| capability.raw()).sum(),
            alignment: self.alignment,
            preferred_batch: self.preferred_batch,
            concurrency: self.concurrency,
            reserved: 0,
        }
    }

    /// What an instance answered.
    pub fn from_raw(raw: &v0_1::CapabilitiesOut) -> Capabilities {
        let has = |capability: Capability| raw.flags & capability.raw() != 0;
        Capabilities {
            linker: has(Capability::Linker),
            ranges: has(Capability::Ranges),
            remove: has(Capability::Remove),
            clear_namespace: has(Capability::ClearNamespace),
            clear_everything: has(Capability::ClearEverything),
            durable: has(Capability::Durable),
            shared: has(Capability::Shared),
            checksums: has(Capability::Checksums),
            logical_pools: has(Capability::LogicalPools),
            cuda_memory: has(Capability::CudaMemory),
            held_pages: has(Capability::HeldPages),
            alignment: raw.alignment,
            preferred_batch: raw.preferred_batch,
            concurrency: raw.concurrency,
        }
    }

    /// The first thing it can do that `declared` can't.
    pub fn beyond(&self, declared: &Capabilities) -> Option<Capability> {
        let pairs = self.flags().into_iter().zip(declared.flags());
        pairs.into_iter().find(|((_, on), (_, declared))| *on && !declared).map(|((capability, _), _)| capability)
    }
}

/// What a note is made of. The export macro fills it.
#[derive(Debug, Clone, Copy)]
pub struct NoteSource {
    /// Name by which a configuration picks the plugin.
    pub name: &'static str,
    /// Version of the plugin.
    pub version: &'static str,
    /// SPDX expression of its licence.
    pub license: &'static str,
    /// One line for a person.
    pub description: &'static str,
    /// Whether it was built with `panic = "abort"`.
    pub panic_abort: bool,
    /// What it can do.
    pub capabilities: Capabilities,
    /// JSON Schema of its configuration.
    pub config_schema: &'static str,
    /// JSON object of a configuration for the conformance suite.
    pub check_config: &'static str,
}

/// A version of the boundary as a note describes it.
#[derive(Debug, Clone, Copy)]
pub struct NoteVersion {
    /// As notes spell it: `0.1`.
    pub text: &'static str,
    /// As the entry symbol takes it.
    pub number: u32,
    /// The description of every type, one line a type.
    pub types: &'static str,
    /// SHA-256 of `types`.
    pub types_sha256: [u8; 32],
}

impl NoteVersion {
    /// Version 0.1.
    pub const V0_1: NoteVersion = NoteVersion {
        text: v0_1::ABI_VERSION_TEXT,
        number: v0_1::ABI_VERSION,
        types: v0_1::TYPES_TEXT,
        types_sha256: v0_1::TYPES_DIGEST,
    };
}

impl NoteSource {
    const fn write_json<const N: usize>(&self, versions: &[NoteVersion], out: &mut ConstWriter<N>) {
        out.text("{\"note\":1,\"name\":");
        out.json_string(self.name);
        out.text(",\"version\":");
        out.json_string(self.version);
        out.text(",\"license\":");
        out.json_string(self.license);
        out.text(",\"description\":");
        out.json_string(self.description);
        out.text(",\"abi\":");
        let mut v = 0;
        while v < versions.len() {
            out.byte(if v == 0 { b'[' } else { b',' });
            out.json_string(versions[v].text);
            v += 1;
        }
        out.text("],\"panic\":\"");
        out.text(if self.panic_abort { "abort" } else { "unwind" });
        out.text("\",\"capabilities\":{");
        let flags = self.capabilities.flags();
        let mut i = 0;
        while i < flags.len() {
            out.json_string(flags[i].0.as_str());
            out.text(if flags[i].1 { ":true," } else { ":false," });
            i += 1;
        }
        out.text("\"alignment\":");
        out.number(self.capabilities.alignment as u64);
        out.text(",\"preferred_batch\":");
        out.number(self.capabilities.preferred_batch as u64);
        out.text(",\"concurrency\":");
        out.number(self.capabilities.concurrency as u64);
        out.text("},\"config_schema\":");
        out.text(self.config_schema);
        out.text(",\"check_config\":");
        out.text(self.check_config);
        out.text(",\"types_sha256\":");
        let mut v = 0;
        while v < versions.len() {
            out.byte(if v == 0 { b'{' } else { b',' });
            out.json_string(versions[v].text);
            out.text(":\"");
            out.hex(&versions[v].types_sha256);
            out.byte(b'"');
            v += 1;
        }
        out.text("},\"types\":");
        let mut v = 0;
        while v < versions.len() {
            out.byte(if v == 0 { b'{' } else { b',' });
            out.json_string(versions[v].text);
            out.byte(b':');
            out.json_string(versions[v].types);
            v += 1;
        }
        out.text("}}");
    }

    const fn json_len(&self, versions: &[NoteVersion]) -> usize {
        let mut writer = ConstWriter::<0>::new();
        self.write_json(versions, &mut writer);
        writer.len()
    }

    /// Bytes of the whole note of a plugin that speaks version 0.1, padded to 4.
    pub const fn note_len(&self) -> usize {
        self.note_len_of(&[NoteVersion::V0_1])
    }

    /// The note of a plugin that speaks version 0.1, as it stands in the section; `N` is [`NoteSource::note_len`].
    pub const fn note<const N: usize>(&self) -> [u8; N] {
        self.note_of(&[NoteVersion::V0_1])
    }

    /// Bytes of the whole note of a plugin that speaks these versions, at least one, padded to 4.
    pub const fn note_len_of(&self, versions: &[NoteVersion]) -> usize {
        NOTE_HEADER + self.json_len(versions).next_multiple_of(4)
    }

    /// The note of a plugin that speaks these versions; `N` is [`NoteSource::note_len_of`].
    pub const fn note_of<const N: usize>(&self, versions: &[NoteVersion]) -> [u8; N] {
        assert!(!versions.is_empty(), "a plugin speaks at least one version");
        let mut out = ConstWriter::<N>::new();
        let owner_len = NOTE_OWNER.len() as u32 + 1;
        out.bytes(&owner_len.to_le_bytes());
        out.bytes(&(self.json_len(versions) as u32).to_le_bytes());
        out.bytes(&NOTE_TYPE.to_le_bytes());
        out.text(NOTE_OWNER);
        out.byte(0);
        out.byte(0);
        self.write_json(versions, &mut out);
        while out.len() < N {
            out.byte(0);
        }
        out.into_bytes()
    }
}

/// Three words, and `kvdock\0` padded to 8 bytes.
const NOTE_HEADER: usize = 12 + 8;

/// A note in the section; the alignment is what ELF asks of notes.
#[repr(C, align(4))]
#[derive(Debug)]
pub struct NoteBytes<const N: usize>(pub [u8; N]);

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: NoteSource = NoteSource {
        name: "note-test",
        version: "1.2.3",
        license: "Apache-2.0",
        description: "says \"hello\"",
        panic_abort: false,
        capabilities: Capabilities { remove: true, ..Capabilities::NONE },
        config_schema: r#"{"type":"object"}"#,
        check_config: "{}",
    };

    #[test]
    fn capabilities_cross_the_boundary_whole() {
        for capability in Capability::ALL {
            let mut raw = Capabilities::NONE.raw();
            raw.flags |= capability.raw();
            let one = Capabilities::from_raw(&raw);
            assert_eq!(one.raw().flags, raw.flags, "{capability}");
            assert_eq!(one.beyond(&Capabilities::NONE), Some(*capability));
            assert_eq!(one.beyond(&one), None);
        }
    }

    #[test]
    fn a_note_is_an_elf_note_with_a_json_object() {
        const LEN: usize = SOURCE.note_len();
        static NOTE: [u8; LEN] = SOURCE.note();
        assert_eq!(LEN % 4, 0);
        let word = |at: usize| u32::from_le_bytes(NOTE[at..at + 4].try_into().unwrap());
        assert_eq!(word(0), 7);
        assert_eq!(word(8), NOTE_TYPE);
        assert_eq!(&NOTE[12..20], b"kvdock\0\0");
        let json: serde_json::Value = serde_json::from_slice(&NOTE[20..20 + word(4) as usize]).unwrap();
        assert_eq!(json["name"], "note-test");
        assert_eq!(json["description"], "says \"hello\"");
        assert_eq!(json["capabilities"]["remove"], true);
        assert_eq!(json["capabilities"]["linker"], false);
        assert_eq!(json["abi"], serde_json::json!(["0.1"]));
        assert_eq!(json["types"]["0.1"], v0_1::TYPES_TEXT);
    }

    #[test]
    fn a_note_of_several_versions_describes_each() {
        const NEWER: NoteVersion =
            NoteVersion { text: "0.9", number: 9, types: "A 4 4 x:0:4:u32\n", types_sha256: [7; 32] };
        const BOTH: &[NoteVersion] = &[NoteVersion::V0_1, NEWER];
        static NOTE: [u8; SOURCE.note_len_of(BOTH)] = SOURCE.note_of(BOTH);
        let len = u32::from_le_bytes(NOTE[4..8].try_into().unwrap()) as usize;
        let json: serde_json::Value = serde_json::from_slice(&NOTE[20..20 + len]).unwrap();
        assert_eq!(json["abi"], serde_json::json!(["0.1", "0.9"]));
        assert_eq!((&json["types"]["0.1"], &json["types"]["0.9"]), (&v0_1::TYPES_TEXT.into(), &NEWER.types.into()));
        assert_eq!(json["types_sha256"]["0.9"], "07".repeat(32));
    }
}
