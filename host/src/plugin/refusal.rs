//! Why a file is no plugin that this host may load.

use std::path::{Path, PathBuf};

/// A refusal: the file, what was expected, what was found. No code of the file has run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}: {reason}", file.display())]
pub struct Refusal {
    /// The file that was refused.
    pub file: PathBuf,
    /// Why.
    pub reason: Reason,
}

/// Kinds of refusal.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Reason {
    /// The file can't be read.
    #[error("can't be read: {0}")]
    Unreadable(String),
    /// Others than the user and root may change the file or its folder.
    #[error(
        "{path}: {problem}; a plugin and its folder must belong to this user or root and be writable by nobody else"
    )]
    Unsafe {
        /// File or folder.
        path: String,
        /// What is wrong with it.
        problem: String,
    },
    /// No ELF shared library.
    #[error("expected an ELF shared library, found {0}")]
    NotElf(String),
    /// For another machine.
    #[error("expected a library for {expected}, found one for {found}")]
    OtherMachine {
        /// This machine.
        expected: String,
        /// The file's.
        found: String,
    },
    /// No note. In a search such files are passed over.
    #[error("expected a section {section} with kvdock's note, found none: this is no kvdock plugin")]
    NoNote {
        /// Name of the section.
        section: &'static str,
    },
    /// The note can't be read.
    #[error("its note can't be read: {0}")]
    BadNote(String),
    /// No ABI version in common.
    #[error("expected ABI version {expected}, found {found}")]
    OtherAbi {
        /// What this host speaks.
        expected: String,
        /// What the plugin speaks.
        found: String,
    },
    /// A type of the boundary differs.
    #[error("its types of ABI version {version} differ from this host's, which knows {host}: {difference}")]
    OtherLayout {
        /// The newest version that both know.
        version: String,
        /// What this host speaks.
        host: String,
        /// In words.
        difference: String,
    },
    /// Built with `panic = "abort"`.
    #[error("expected a plugin built with panic = \"unwind\", found {0:?}: a panic in it would end the server")]
    PanicAbort(String),
    /// No entry symbol.
    #[error("expected the symbol {0} in its dynamic symbol table, found none")]
    NoEntry(&'static str),
    /// The file is not the one that the configuration pins.
    #[error("expected SHA-256 {expected} as pinned in the configuration, found {found}")]
    OtherDigest {
        /// Pinned.
        expected: String,
        /// Found.
        found: String,
    },
    /// Mapping it would harm the server.
    #[error("a new library is mapped in a process of its own first: {0}")]
    Constructors(String),
    /// The dynamic loader refused it.
    #[error("the dynamic loader refused it: {0}")]
    Loader(String),
}

impl Reason {
    /// The refusal of `file` for this reason.
    pub fn of(self, file: &Path) -> Refusal {
        Refusal { file: file.to_owned(), reason: self }
    }
}
