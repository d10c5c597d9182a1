//! Appending records.

use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};

use super::buffer::Buffer;
use super::file::{Location, Segment};
use super::log::Log;
use super::plain;
use super::record::{Checksum, HEADER, Header, Version, record_len, value_at};
use crate::object::Piece;

/// Bytes of one write, unless a record is longer.
const WRITE: u64 = 8 << 20;
/// A buffer larger than this is given back.
const KEEP: usize = 32 << 20;

/// What is appended.
#[derive(Debug)]
pub struct Item<'a> {
    /// Key.
    pub key: &'a [u8],
    /// Value, one piece after another.
    pub pieces: &'a [Piece],
}

impl Item<'_> {
    fn value_len(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.len as u64).sum()
    }
}

/// What the one that writes has in hand.
#[derive(Debug, Default)]
pub(super) struct Writer {
    pub active: Option<Arc<Segment>>,
    pub next: u64,
    buffers: Vec<Buffer>,
}

/// Records that go into a segment in one write.
#[derive(Debug)]
struct Plan<'a> {
    segment: Arc<Segment>,
    start: u64,
    items: &'a [Item<'a>],
    /// Counted in the segment from the moment on that they are planned: nobody takes it for one that holds nothing.
    bytes: u64,
    written: AtomicBool,
}

impl Log {
    /// Appends records. When it answers, they are as durable as the options say. All or none: after an error none of them counts.
    ///
    /// # Errors
    /// When they could not be written.
    ///
    /// # Safety
    /// The pieces can be read, and nobody writes them meanwhile.
    pub unsafe fn append(&self, items: &[Item<'_>]) -> io::Result<Vec<Location>> {
        let mut writer = self.writer.lock();
        let mut plans = Vec::new();
        let mut locations: Vec<Location> = Vec::with_capacity(items.len());
        let planned = self.plan(&mut writer, items, &mut plans);
        // SAFETY: passed on to the caller.
        let result = planned.and_then(|()| unsafe { self.write(&mut writer, &plans, &mut locations) });
        let Err(error) = result else { return Ok(locations) };
        // Nothing is appended behind what went wrong, and what was planned for is not kept.
        writer.active = None;
        drop(writer);
        plans.iter().for_each(|plan| plan.segment.sealed.store(true, Ordering::Release));
        for plan in plans.iter().filter(|plan| !plan.written.load(Ordering::Acquire)) {
            plan.segment.live.fetch_sub(plan.bytes, Ordering::AcqRel);
        }
        locations.iter().for_each(|location| self.forget(location));
        plans.iter().for_each(|plan| self.drop_segment(&plan.segment));
        Err(error)
    }

    /// Says which records go where; makes the files for them.
    fn plan<'a>(&self, writer: &mut Writer, items: &'a [Item<'a>], plans: &mut Vec<Plan<'a>>) -> io::Result<()> {
        let mut rest = items;
        let mut end: Option<(Arc<Segment>, u64)> = None;
        while let Some(first) = rest.first() {
            let len = len_of(first)?;
            let (segment, start) = match end {
                Some((segment, end)) if end + len <= self.options.segment => (segment, end),
                full => {
                    if let Some((segment, _)) = full {
                        segment.sealed.store(true, Ordering::Release);
                    }
                    let segment = self.active(writer, len)?;
                    let start = segment.len();
                    (segment, start)
                }
            };
            let (mut count, mut bytes) = (0, 0);
            for item in rest {
                let len = len_of(item)?;
                // A record that is longer than a segment has one to itself.
                let fits = start + bytes + len <= self.options.segment || start + bytes == 0;
                if count > 0 && (bytes + len > WRITE || !fits) {
                    break;
                }
                count += 1;
                bytes += len;
            }
            let (now, later) = rest.split_at(count);
            rest = later;
            end = Some((segment.clone(), start + bytes));
            segment.live.fetch_add(bytes, Ordering::AcqRel);
            plans.push(Plan { segment, start, items: now, bytes, written: AtomicBool::new(false) });
        }
        Ok(())
    }

    /// Writes what was planned.
    unsafe fn write(&self, writer: &mut Writer, plans: &[Plan<'_>], locations: &mut Vec<Location>) -> io::Result<()> {
        let mut buffers = std::mem::take(&mut writer.buffers);
        buffers.resize_with(2, Buffer::new);
        let (mut headers, written) = (Vec::with_capacity(plans.len()), AtomicUsize::new(0));
        let fill = |plan: &Plan<'_>, buffer: &mut Buffer| {
            // SAFETY: passed on to the caller.
            unsafe { plan.fill(buffer, &self.generation, self.options.verify) }
        };
        let result = match plans {
            [_, _, ..] => write_by_turns(plans, &mut buffers, &fill, &mut headers, &written),
            _ => write_each(plans, &mut buffers, &fill, &mut headers, &written),
        };
        buffers.iter_mut().for_each(|buffer| buffer.shrink(KEEP));
        writer.buffers = buffers;
        for (plan, headers) in plans.iter().zip(headers).take(written.into_inner()) {
            locations.extend(headers.iter().map(|(offset, header)| Location::of(&plan.segment, *offset, header)));
        }
        result?;
        if self.options.strict {
            for (at, plan) in plans.iter().enumerate() {
                let before = at.checked_sub(1).and_then(|before| plans.get(before));
                if before.is_none_or(|before| !Arc::ptr_eq(&before.segment, &plan.segment)) {
                    let segment = &plan.segment;
                    segment.file.sync_data().map_err(|error| plain::named(&segment.path, &error))?;
                }
            }
        }
        Ok(())
    }

    /// The segment that a record of so many bytes goes to.
    fn active(&self, writer: &mut Writer, len: u64) -> io::Result<Arc<Segment>> {
        if let Some(active) = writer.active.take() {
            // What somebody else has removed or cut takes no more records: nobody would find them.
            let fits = active.len() + len <= self.options.segment;
            if fits && !active.is_sealed() && active.can_grow()? {
                writer.active = Some(active.clone());
                return Ok(active);
            }
            active.sealed.store(true, Ordering::Release);
        }
        if self.hold()? {
            // Somebody else may have written here meanwhile.
            writer.next = self.ids()?.last().map_or(writer.next, |last| writer.next.max(last + 1));
        }
        let segment = Segment::open(&self.dir, writer.next, &self.options, true)?;
        if self.options.strict {
            // The name of the file has to be there after a power cut as well.
            plain::sync_dir(&self.dir)?;
        }
        writer.next += 1;
        self.segments.lock().insert(segment.id, segment.clone());
        writer.active = Some(segment.clone());
        Ok(segment)
    }
}

/// Headers of a write, and where in the file each record begins.
type Headers = Vec<(u64, Header)>;
/// Makes the bytes of a write.
type Fill<'a> = &'a dyn Fn(&Plan<'_>, &mut Buffer) -> io::Result<Headers>;

/// Makes one write after the other. `written` says how many are done.
fn write_each(
    plans: &[Plan<'_>],
    buffers: &mut [Buffer],
    fill: Fill<'_>,
    headers: &mut Vec<Headers>,
    written: &AtomicUsize,
) -> io::Result<()> {
    let Some(buffer) = buffers.first_mut() else { return Ok(()) };
    for plan in plans {
        headers.push(fill(plan, buffer)?);
        plan.write(buffer)?;
        written.fetch_add(1, Ordering::AcqRel);
    }
    Ok(())
}

/// The same; while one write is on its way to the disk, the next one is made.
fn write_by_turns(
    plans: &[Plan<'_>],
    buffers: &mut Vec<Buffer>,
    fill: Fill<'_>,
    headers: &mut Vec<Headers>,
    written: &AtomicUsize,
) -> io::Result<()> {
    let (full, filled) = mpsc::sync_channel::<(usize, Buffer)>(1);
    let (back, empty) = mpsc::channel();
    // When it ends, both channels end: nobody waits for what will not come.
    let write = move || -> io::Result<()> {
        for (number, buffer) in filled {
            plans.get(number).map_or(Ok(()), |plan| plan.write(&buffer))?;
            written.fetch_add(1, Ordering::AcqRel);
            let _ = back.send(buffer);
        }
        Ok(())
    };
    let done = std::thread::scope(|scope| {
        let full = full;
        let Ok(thread) = std::thread::Builder::new().spawn_scoped(scope, write) else { return None };
        for (number, plan) in plans.iter().enumerate() {
            let Some(mut buffer) = buffers.pop().or_else(|| empty.recv().ok()) else { break };
            match fill(plan, &mut buffer) {
                Ok(made) => headers.push(made),
                Err(error) => return Some(Err(error)),
            }
            if full.send((number, buffer)).is_err() {
                break;
            }
        }
        drop(full);
        let panicked = |_| Err(io::Error::other("the thread that writes segments has panicked"));
        Some(thread.join().unwrap_or_else(panicked))
    });
    buffers.extend(empty.try_iter());
    // Where there is no further thread, each write is waited for.
    done.unwrap_or_else(|| write_each(plans, buffers, fill, headers, written))
}

impl Plan<'_> {
    /// Makes the bytes of the write, and says where in the file each record begins.
    ///
    /// # Safety
    /// The pieces can be read, and nobody writes them meanwhile.
    unsafe fn fill(&self, buffer: &mut Buffer, generation: &AtomicU64, checked: bool) -> io::Result<Headers> {
        buffer.reserve(self.bytes as usize);
        let mut rest = buffer.bytes_mut().get_mut(..self.bytes as usize).unwrap_or_default();
        let mut headers = Vec::with_capacity(self.items.len());
        let mut at = self.start;
        for item in self.items {
            let generation = generation.fetch_add(1, Ordering::AcqRel) + 1;
            let len = len_of(item)?;
            let (record, later) = rest.split_at_mut(len as usize);
            // SAFETY: passed on to the caller.
            headers.push((at, unsafe { fill(record, item, generation, checked) }));
            rest = later;
            at += len;
        }
        Ok(headers)
    }

    fn write(&self, buffer: &Buffer) -> io::Result<()> {
        let (segment, start) = (&self.segment, self.start);
        let file = segment.direct.as_ref().unwrap_or(&segment.file);
        let bytes = buffer.bytes().get(..self.bytes as usize).unwrap_or_default();
        if let Err(error) = file.write_all_at(bytes, start) {
            // What was written is cut off; where even that fails, checksums tell, and nothing is appended behind it.
            let _ = segment.file.set_len(start);
            return Err(plain::named(&segment.path, &error));
        }
        segment.len.store(start + self.bytes, Ordering::Release);
        self.written.store(true, Ordering::Release);
        Ok(())
    }
}

fn len_of(item: &Item<'_>) -> io::Result<u64> {
    let long = |_| io::Error::new(io::ErrorKind::InvalidInput, "a record has less than 4 GiB");
    let key = u32::try_from(item.key.len()).map_err(long)?;
    Ok(record_len(Version::Three, key, u32::try_from(item.value_len()).map_err(long)?))
}

/// Makes a record of version 3. Padding is zero.
unsafe fn fill(record: &mut [u8], item: &Item<'_>, generation: u64, checked: bool) -> Header {
    let key_len = item.key.len() as u32;
    let at = value_at(Version::Three, key_len) as usize;
    let (head, body) = record.split_at_mut(at);
    let key_end = HEADER + item.key.len();
    let mut sum = Checksum::new(Version::Three);
    if let Some(key) = head.get_mut(HEADER..key_end) {
        key.copy_from_slice(item.key);
    }
    head.get_mut(key_end..).unwrap_or_default().fill(0);
    if checked {
        sum.add(item.key);
    }
    let mut rest = body;
    for piece in item.pieces {
        // SAFETY: the caller says that the piece can be read.
        let bytes = unsafe { std::slice::from_raw_parts(piece.base, piece.len) };
        let (now, later) = rest.split_at_mut(piece.len);
        // In steps that stay in the cache between the copy and the checksum.
        for (to, from) in now.chunks_mut(1 << 15).zip(bytes.chunks(1 << 15)) {
            to.copy_from_slice(from);
            if checked {
                sum.add(to);
            }
        }
        rest = later;
    }
    rest.fill(0);
    let header = Header {
        version: Version::Three,
        committed: true,
        checked,
        key_len,
        value_len: item.value_len() as u32,
        crc: if checked { sum.sum() } else { 0 },
        generation,
    };
    if let Some(to) = head.get_mut(..HEADER) {
        to.copy_from_slice(&header.encode());
    }
    header
}
