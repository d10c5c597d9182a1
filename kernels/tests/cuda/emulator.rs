//! Runs kernels on the CPU: the process that the shim and one kernel file make, and what it is told.

use std::io::{BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use super::compile::Program;

/// What goes wrong is told in words: a difference, or what the sanitizer says.
pub type Checked = Result<(), String>;

/// Numbers that kernels take.
pub trait Number: Copy {
    const BYTES: usize;
    fn put(self, to: &mut Vec<u8>);
    fn get(from: &[u8]) -> Self;
}

macro_rules! number {
    ($($name:ident)*) => {
        $(impl Number for $name {
            const BYTES: usize = size_of::<$name>();
            fn put(self, to: &mut Vec<u8>) {
                to.extend_from_slice(&self.to_le_bytes());
            }
            fn get(from: &[u8]) -> Self {
                Self::from_le_bytes(from.try_into().unwrap())
            }
        })*
    };
}
number!(u8 u16 u32 u64 i32 f32 f64);

/// Memory of the emulated GPU.
#[derive(Debug, Clone, Copy)]
pub struct Memory {
    id: u32,
}

/// An argument of a launch.
pub enum Arg {
    /// The memory from a byte on.
    At(Memory, u64),
    Null,
    Value(Vec<u8>),
}

impl From<Memory> for Arg {
    fn from(memory: Memory) -> Self {
        Self::At(memory, 0)
    }
}
impl From<Option<Memory>> for Arg {
    fn from(memory: Option<Memory>) -> Self {
        memory.map_or(Self::Null, Self::from)
    }
}
macro_rules! value {
    ($($name:ident)*) => {
        $(impl From<$name> for Arg {
            fn from(x: $name) -> Self {
                Self::Value(x.to_le_bytes().to_vec())
            }
        })*
    };
}
value!(u32 u64 f32 f64);

/// The arguments of a launch, of any kinds.
#[macro_export]
macro_rules! args {
    ($($x:expr),* $(,)?) => { &[$($crate::emulator::Arg::from($x)),*] };
}

/// A grid: blocks along x, y, z, threads of a block, bytes of dynamic shared memory.
#[derive(Debug, Clone, Copy)]
pub struct Grid(pub [u32; 3], pub u32, pub u32);

/// Blocks along x alone.
pub fn line(blocks: usize, threads: u32) -> Grid {
    Grid([blocks as u32, 1, 1], threads, 0)
}

/// An emulated GPU with the kernels of one file.
pub struct Gpu {
    child: Child,
    to: Option<ChildStdin>,
    from: BufReader<ChildStdout>,
    memories: u32,
    /// Threads and blocks run in an order that follows from it.
    pub seed: u64,
}

impl Gpu {
    pub fn new(program: &Program, seed: u64) -> Self {
        let mut child = Command::new(&program.path)
            .env("ASAN_OPTIONS", "detect_leaks=0:detect_stack_use_after_return=0")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|e| panic!("can't start {}: {e}", program.path.display()));
        let (to, from) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, to, from, memories: 0, seed }
    }

    fn send(&mut self, bytes: &[u8]) -> Checked {
        let to = self.to.as_mut().ok_or("the emulator has ended")?;
        let sent = to.write_all(bytes).and_then(|()| to.flush());
        sent.map_err(|_| self.reason())
    }

    /// What the emulator says as it ends.
    fn reason(&mut self) -> String {
        self.to = None;
        let mut said = String::new();
        if let Some(mut stderr) = self.child.stderr.take() {
            let _ = stderr.read_to_string(&mut said);
        }
        let status = self.child.wait().map_or_else(|e| e.to_string(), |status| status.to_string());
        format!("the emulator ended with {status}:\n{said}")
    }

    /// Memory that holds `values`, and no byte more.
    pub fn memory<T: Number>(&mut self, values: &[T]) -> Result<Memory, String> {
        let id = self.memories;
        self.memories += 1;
        let mut bytes = vec![b'A'];
        id.put(&mut bytes);
        ((values.len() * T::BYTES) as u64).put(&mut bytes);
        values.iter().for_each(|x| x.put(&mut bytes));
        self.send(&bytes)?;
        Ok(Memory { id })
    }

    /// Memory of `len` f32 that are no numbers.
    pub fn poison(&mut self, len: usize) -> Result<Memory, String> {
        self.memory(&vec![f32::NAN; len])
    }

    /// Writes the address of byte `offset` of `target` to byte `at` of `memory`.
    pub fn point(&mut self, memory: Memory, at: u64, target: Memory, offset: u64) -> Checked {
        let mut bytes = vec![b'F'];
        memory.id.put(&mut bytes);
        at.put(&mut bytes);
        target.id.put(&mut bytes);
        offset.put(&mut bytes);
        self.send(&bytes)
    }

    pub fn launch(&mut self, kernel: &str, grid: Grid, args: &[Arg]) -> Checked {
        let mut bytes = vec![b'L'];
        (kernel.len() as u32).put(&mut bytes);
        bytes.extend_from_slice(kernel.as_bytes());
        for n in [grid.0[0], grid.0[1], grid.0[2], grid.1, 1, 1, grid.2] {
            n.put(&mut bytes);
        }
        self.seed.put(&mut bytes);
        (args.len() as u32).put(&mut bytes);
        for arg in args {
            match arg {
                Arg::At(memory, offset) => {
                    bytes.push(b'p');
                    memory.id.put(&mut bytes);
                    offset.put(&mut bytes);
                }
                Arg::Null => bytes.push(b'n'),
                Arg::Value(value) => {
                    bytes.extend_from_slice(&[b'v', value.len() as u8]);
                    bytes.extend_from_slice(value);
                }
            }
        }
        self.send(&bytes)
    }

    /// The kernels that the file exports.
    pub fn names(&mut self) -> Result<Vec<String>, String> {
        self.send(b"N")?;
        let mut part = |len: usize| {
            let mut bytes = vec![0; len];
            self.from.read_exact(&mut bytes).map(|()| bytes).map_err(|e| e.to_string())
        };
        let count = u32::get(&part(4)?);
        (0..count)
            .map(|_| {
                let len = u32::get(&part(4)?) as usize;
                String::from_utf8(part(len)?).map_err(|e| e.to_string())
            })
            .collect()
    }

    pub fn read<T: Number>(&mut self, memory: Memory) -> Result<Vec<T>, String> {
        let mut bytes = vec![b'R'];
        memory.id.put(&mut bytes);
        self.send(&bytes)?;
        let mut len = [0; 8];
        let mut content = Vec::new();
        let read = self.from.read_exact(&mut len).and_then(|()| {
            content.resize(u64::from_le_bytes(len) as usize, 0);
            self.from.read_exact(&mut content)
        });
        if read.is_err() {
            return Err(self.reason());
        }
        Ok(content.chunks_exact(T::BYTES).map(T::get).collect())
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // Nothing is left to do for it; one that has ended already is no error.
        self.to = None;
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
