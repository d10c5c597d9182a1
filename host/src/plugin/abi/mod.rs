//! The versions of the boundary that this host speaks.
//!
//! Each released version is a table of C functions of its own, frozen in `kvdock_plugin_api`. The host calls through one [`Face`], which has the shape of the
//! newest version it knows. A plugin is loaded by the newest version that both sides know; the table of an older one is adapted upward
//! to the face when the library is mapped. So nothing above this module knows versions.
//!
//! A new version is a module beside [`v0_1`] and a line in [`AbiVersions::BUILT_IN`]; then the face takes the new version's arguments, and `v0_1`
//! becomes an adapter. The trial in `tests/tests/abi` does that from outside, with a version 0.2 that this program does not know.

mod face;
mod v0_1;

use std::ffi::c_void;
use std::fmt;

pub use face::{Face, LinkerFace, RawInstance};

/// One version of the boundary.
pub struct AbiVersion {
    /// As notes and messages spell it.
    pub text: &'static str,
    /// As the entry symbol takes it: major in the upper, minor in the lower 16 bits.
    pub number: u32,
    /// The description of every type of the version, one line a type.
    pub types: &'static str,
    /// SHA-256 of `types`.
    pub types_sha256: [u8; 32],
    /// Bytes of a plugin's table.
    pub table_bytes: u64,
    /// Puts the host's face over a plugin's table of this version.
    ///
    /// # Safety
    /// The address is that of a constant table of this version, in a library that stays mapped.
    pub adapt: unsafe fn(table: *const c_void) -> &'static dyn Face,
}

impl fmt::Debug for AbiVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AbiVersion").field("text", &self.text).field("number", &self.number).finish_non_exhaustive()
    }
}

/// The versions that a host knows, from the oldest to the newest.
#[derive(Debug, Clone, Copy)]
pub struct AbiVersions(&'static [AbiVersion]);

impl AbiVersions {
    /// Those of this build.
    pub const BUILT_IN: AbiVersions = AbiVersions::new(&[v0_1::VERSION]);

    /// The versions of another host.
    ///
    /// # Panics
    /// When there is none, or they do not ascend.
    pub const fn new(versions: &'static [AbiVersion]) -> AbiVersions {
        assert!(!versions.is_empty(), "a host knows at least one version");
        let mut i = 1;
        while i < versions.len() {
            assert!(versions[i - 1].number < versions[i].number, "versions stand from the oldest to the newest");
            i += 1;
        }
        AbiVersions(versions)
    }

    /// The newest version that the host and a plugin with these versions know.
    pub fn newest_of(self, plugin: &[String]) -> Option<&'static AbiVersion> {
        self.0.iter().rev().find(|version| plugin.iter().any(|known| known == version.text))
    }

    /// Tells hosts apart that live in one process.
    pub(super) fn id(self) -> usize {
        self.0.as_ptr() as usize
    }
}

impl Default for AbiVersions {
    fn default() -> Self {
        AbiVersions::BUILT_IN
    }
}

/// `0.1 or 0.2`
impl fmt::Display for AbiVersions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, version) in self.0.iter().enumerate() {
            f.write_str(if index == 0 { "" } else { " or " })?;
            f.write_str(version.text)?;
        }
        Ok(())
    }
}

/// What every table of every version begins with.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TableHeader {
    pub(super) size: u64,
    pub(super) abi_version: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn version(text: &'static str, number: u32) -> AbiVersion {
        AbiVersion { text, number, ..v0_1::VERSION }
    }

    const THREE: AbiVersions = AbiVersions::new(&[version("0.1", 1), version("0.2", 2), version("1.0", 0x1_0000)]);

    #[test]
    fn the_newest_version_that_both_know_is_picked() {
        let pick = |known: &[&str]| {
            let known: Vec<String> = known.iter().map(|text| (*text).to_owned()).collect();
            THREE.newest_of(&known).map(|version| version.text)
        };
        assert_eq!(pick(&["0.1"]), Some("0.1"));
        assert_eq!(pick(&["0.2", "0.1"]), Some("0.2"));
        assert_eq!(pick(&["0.1", "0.2", "1.0", "1.1"]), Some("1.0"));
        assert_eq!(pick(&["0.3"]), None);
        assert_eq!(pick(&[]), None);
    }

    #[test]
    fn all_versions_are_named() {
        assert_eq!(THREE.to_string(), "0.1 or 0.2 or 1.0");
        assert_eq!(AbiVersions::BUILT_IN.to_string(), "0.1");
    }

    #[test]
    #[should_panic(expected = "from the oldest to the newest")]
    fn versions_out_of_order_are_no_host() {
        AbiVersions::new(Box::leak(Box::new([version("0.2", 2), version("0.1", 1)])));
    }
}
