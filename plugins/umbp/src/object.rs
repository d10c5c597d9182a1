//! What every mode offers: named objects, put whole, read by ranges.

use std::fmt::Debug;

use kvdock_plugin_api::{Call, ClearScope, Health, HeldPages, Pool, Result};

/// A run of bytes in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Address of the first byte.
    pub base: *mut u8,
    /// Bytes.
    pub len: usize,
}

// SAFETY: a piece is an address; who uses it has the promise of the call that it came with.
unsafe impl Send for Piece {}
// SAFETY: as for `Send`.
unsafe impl Sync for Piece {}

/// Where a run of bytes of an object goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    /// Offset in the object.
    pub offset: u64,
    /// Where to.
    pub piece: Piece,
}

/// An object that is to be stored.
#[derive(Debug)]
pub struct Put {
    /// Its name.
    pub name: Vec<u8>,
    /// Its bytes, one piece after another.
    pub pieces: Vec<Piece>,
    /// Pages of the sequence before it.
    pub depth: u32,
}

impl Put {
    /// Bytes of the object.
    pub fn len(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.len as u64).sum()
    }
}

/// An object that is to be read.
#[derive(Debug, Clone)]
pub struct Read {
    /// Its name.
    pub name: Vec<u8>,
    /// Bytes that it has to have.
    pub len: u64,
    /// The parts that are wanted; each ends within `len`.
    pub ranges: Vec<Range>,
}

impl Read {
    /// Whether all of the object is read, in order.
    pub fn is_whole(&self) -> bool {
        let mut end = 0;
        self.ranges.iter().all(|range| {
            let follows = range.offset == end;
            end = range.offset + range.piece.len as u64;
            follows
        }) && end == self.len
    }
}

/// What became of a put.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stored {
    /// It is stored, or was already.
    Yes,
    /// There is no room for it, or it is not taken.
    Refused,
    /// It could not be written.
    Failed(String),
}

/// What became of a read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Got {
    /// The ranges are filled.
    Yes,
    /// There is no such object.
    Missing,
    /// Its bytes are not what was stored, or are of another length.
    Corrupt(String),
    /// It could not be read.
    Failed(String),
}

/// What a store holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Held {
    /// Objects.
    pub objects: u64,
    /// Bytes that they take.
    pub used: u64,
    /// Bytes that there are; 0 when that is not known.
    pub total: u64,
}

/// A store of named objects.
pub trait Objects: Debug + Send + Sync {
    /// Which of these are there.
    ///
    /// # Errors
    /// When the store can't be asked.
    fn exists(&self, names: &[Vec<u8>], call: &Call<'_>) -> Result<Vec<bool>>;

    /// Stores objects, each whole or not at all. Bytes that are there under a name stay.
    ///
    /// # Errors
    /// When the store can't be reached.
    ///
    /// # Safety
    /// The pieces may be read until the call returns, and nobody writes them.
    unsafe fn put(&self, puts: &[Put], call: &Call<'_>) -> Result<Vec<Stored>>;

    /// Reads ranges of objects.
    ///
    /// # Errors
    /// When the store can't be reached.
    ///
    /// # Safety
    /// The pieces may be written until the call returns, nobody else touches them, and no two overlap.
    unsafe fn get(&self, reads: &[Read], call: &Call<'_>) -> Result<Vec<Got>>;

    /// Removes objects; says which were there.
    ///
    /// # Errors
    /// When the store can't do that.
    fn remove(&self, names: &[Vec<u8>], call: &Call<'_>) -> Result<Vec<bool>>;

    /// Removes what is named with a prefix, or everything.
    ///
    /// # Errors
    /// When the store can't do that.
    fn clear(&self, prefix: &[u8], scope: ClearScope, call: &Call<'_>) -> Result<()>;

    /// Makes what was stored as durable as the settings say.
    ///
    /// # Errors
    /// When that failed.
    fn flush(&self, call: &Call<'_>) -> Result<()>;

    /// Takes the memory of a pool.
    ///
    /// # Errors
    /// When the store can't use it.
    fn register(&self, pool: &Pool, call: &Call<'_>) -> Result<()>;

    /// Gives it back.
    fn unregister(&self, pool: &Pool);

    /// Passes on what the worker holds itself.
    ///
    /// # Errors
    /// When that failed.
    fn report(&self, _held: &HeldPages<'_>) -> Result<()> {
        Ok(())
    }

    /// Figures.
    fn held(&self) -> Held;

    /// How it is.
    fn health(&self) -> Health;

    /// New objects may be stored here. Where not, a put is well for what is there, and refused for all else.
    fn takes_objects(&self) -> bool {
        true
    }

    /// What is stored is kept for the next process.
    fn is_durable(&self) -> bool;

    /// Objects can be removed one by one.
    fn can_remove(&self) -> bool;

    /// Parts of objects can be read.
    fn has_ranges(&self) -> bool;

    /// Writes what has to be kept, and stops.
    ///
    /// # Errors
    /// When something could not be kept.
    fn close(&self, call: &Call<'_>) -> Result<()>;
}
