//! What ranks of one model do together: sums and concatenations of what each of them has computed.
//!
//! A model that is spread over ranks calls these operations in the same order on every rank, under no condition or under one that is the same
//! on all of them. [`InProcess`] connects ranks that are threads of this process; a device with a network of its own has a [`Collective`] of its
//! own.
//!
//! Sums are made in order of the ranks, whoever comes first: a result has the same bits in every run.

use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use crate::device::{Buf, Device};
use crate::error::KernelError;

/// One rank's part in a group.
///
/// A call that fails on one rank fails on all: none of them waits for one that does not come.
pub trait Collective: Send + Sync {
    /// Number of this rank, from 0.
    fn rank(&self) -> usize;

    /// Ranks of the group.
    fn size(&self) -> usize;

    /// Replaces the first `len` elements of `buf` with the sum of all ranks' elements, added in order of the ranks.
    ///
    /// # Errors
    /// Another operation or length on another rank, a rank that failed, a buffer that is too short.
    fn all_reduce(&self, device: &dyn Device, buf: &mut Buf, len: usize) -> Result<(), KernelError>;

    /// Writes the first `len` elements of every rank's `part` to `whole`, one rank's after the other's: `[size, len]`.
    ///
    /// # Errors
    /// As [`Collective::all_reduce`].
    fn all_gather(&self, device: &dyn Device, part: &Buf, len: usize, whole: &mut Buf) -> Result<(), KernelError> {
        self.all_gather_parts(device, part, &vec![len; self.size()], whole)
    }

    /// As [`Collective::all_gather`], of parts of different lengths: `lens[rank]` elements of each rank.
    ///
    /// # Errors
    /// As [`Collective::all_reduce`].
    fn all_gather_parts(
        &self,
        device: &dyn Device,
        part: &Buf,
        lens: &[usize],
        whole: &mut Buf,
    ) -> Result<(), KernelError>;
}

/// What a rank brings to a call.
#[derive(Clone)]
struct Part {
    /// The rank's calls before this one.
    call: u64,
    op: &'static str,
    /// Elements that the ranks bring: of each, or for a sum one number for all.
    lens: Arc<[usize]>,
    values: Arc<[f32]>,
}

#[derive(Default)]
struct State {
    /// Calls that each rank has begun.
    calls: Vec<u64>,
    /// The parts of the calls with even and with odd numbers. A rank begins a call only when it has the results of the one before, so when
    /// one begins call n, all have read what belongs to call n - 2, and its place is free without anyone waiting for that.
    parts: [Vec<Option<Part>>; 2],
    /// Why the pass under way can't go on.
    failure: Option<String>,
}

/// The ranks of a model that are threads of this process.
pub struct RankGroup {
    size: usize,
    state: Mutex<State>,
    changed: Condvar,
}

impl RankGroup {
    /// A group of `size` ranks.
    pub fn new(size: usize) -> Arc<Self> {
        let group = Self { size: size.max(1), state: Mutex::default(), changed: Condvar::new() };
        group.reset();
        Arc::new(group)
    }

    /// Ranks of the group.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Ends the pass under way: ranks that wait for others, and those that will, get this as an error.
    pub fn fail(&self, reason: &str) {
        let mut state = self.state.lock();
        state.failure.get_or_insert_with(|| reason.to_owned());
        self.changed.notify_all();
    }

    /// Begins anew. To be called while no rank is in a pass.
    pub fn reset(&self) {
        let none = || vec![None; self.size];
        *self.state.lock() = State { calls: vec![0; self.size], parts: [none(), none()], failure: None };
    }

    /// Hands `values` to the other ranks and gets what all of them bring, in order of the ranks.
    fn exchange(
        &self,
        rank: usize,
        op: &'static str,
        lens: &[usize],
        values: Arc<[f32]>,
    ) -> Result<Vec<Arc<[f32]>>, KernelError> {
        let mut state = self.state.lock();
        let call = state.calls[rank];
        state.calls[rank] += 1;
        let place = usize::from(!call.is_multiple_of(2));
        state.parts[place][rank] = Some(Part { call, op, lens: lens.into(), values });
        let here = |state: &State| state.parts[place].iter().flatten().filter(|part| part.call == call).count();
        if here(&state) == self.size {
            if state.failure.is_none() {
                state.failure = disagreement(&state.parts[place]);
            }
            self.changed.notify_all();
        }
        while state.failure.is_none() && here(&state) < self.size {
            self.changed.wait(&mut state);
        }
        if let Some(reason) = &state.failure {
            return Err(KernelError::Device { op, reason: reason.clone() });
        }
        Ok(state.parts[place].iter().flatten().map(|part| Arc::clone(&part.values)).collect())
    }
}

/// What differs between the ranks' parts of one call.
fn disagreement(parts: &[Option<Part>]) -> Option<String> {
    let mut parts = parts.iter().flatten();
    let first = parts.next()?;
    let other = parts.find(|part| (part.op, &part.lens) != (first.op, &first.lens))?;
    let elements = |part: &Part| part.lens.iter().map(usize::to_string).collect::<Vec<_>>().join("+");
    Some(format!(
        "ranks are at different operations: {} of {} elements, and {} of {}",
        first.op,
        elements(first),
        other.op,
        elements(other)
    ))
}

/// A rank that is a thread of this process.
pub struct InProcess {
    group: Arc<RankGroup>,
    rank: usize,
}

impl InProcess {
    /// The ranks of `group`, in order.
    pub fn ranks(group: &Arc<RankGroup>) -> Vec<Arc<dyn Collective>> {
        let rank = |rank| Arc::new(Self { group: Arc::clone(group), rank }) as Arc<dyn Collective>;
        (0..group.size).map(rank).collect()
    }

    fn exchange(
        &self,
        op: &'static str,
        device: &dyn Device,
        buf: &Buf,
        (len, lens): (usize, &[usize]),
    ) -> Result<Vec<Arc<[f32]>>, KernelError> {
        let mut own = vec![0.0; len];
        match device.read(buf, 0, &mut own) {
            Ok(()) => self.group.exchange(self.rank, op, lens, own.into()),
            Err(error) => {
                self.group.fail(&format!("rank {}: {error}", self.rank));
                Err(error)
            }
        }
    }
}

impl Collective for InProcess {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.group.size
    }

    fn all_reduce(&self, device: &dyn Device, buf: &mut Buf, len: usize) -> Result<(), KernelError> {
        let parts = self.exchange("all_reduce", device, buf, (len, &[len]))?;
        let mut sum = vec![0.0; len];
        for (rank, part) in parts.iter().enumerate() {
            match rank {
                0 => sum.copy_from_slice(part),
                _ => sum.iter_mut().zip(part.iter()).for_each(|(sum, value)| *sum += value),
            }
        }
        device.write(buf, 0, &sum)
    }

    fn all_gather_parts(
        &self,
        device: &dyn Device,
        part: &Buf,
        lens: &[usize],
        whole: &mut Buf,
    ) -> Result<(), KernelError> {
        let len = lens.get(self.rank).copied().unwrap_or(0);
        let parts = self.exchange("all_gather", device, part, (len, lens))?;
        let mut at = 0;
        for part in parts {
            device.write(whole, at, &part)?;
            at += part.len();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::CpuDevice;

    /// Runs `work` as each rank of a group, on a thread and a device of its own.
    fn ranks<T: Send>(size: usize, work: impl Fn(&dyn Collective, &dyn Device) -> T + Sync) -> Vec<T> {
        let group = RankGroup::new(size);
        let work = &work;
        std::thread::scope(|scope| {
            let threads: Vec<_> = InProcess::ranks(&group)
                .into_iter()
                .map(|rank| scope.spawn(move || work(rank.as_ref(), &CpuDevice::new(1).unwrap())))
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    fn values(device: &dyn Device, buf: &Buf, len: usize) -> Vec<f32> {
        let mut out = vec![0.0; len];
        device.read(buf, 0, &mut out).unwrap();
        out
    }

    #[test]
    fn sums_are_made_in_order_of_the_ranks() {
        // In another order the small ones would not be lost to rounding.
        let parts = [1.0f32, 1e8, -1e8, 1.0];
        for _ in 0..50 {
            let sums = ranks(4, |rank, device| {
                let mut buf = device.upload(&[parts[rank.rank()], rank.rank() as f32, 7.0]).unwrap();
                rank.all_reduce(device, &mut buf, 2).unwrap();
                values(device, &buf, 3)
            });
            assert!(sums.iter().all(|sum| *sum == [((1.0 + 1e8) - 1e8) + 1.0, 6.0, 7.0]), "{sums:?}");
        }
    }

    #[test]
    fn many_calls_in_a_row_keep_apart() {
        let sums = ranks(3, |rank, device| {
            let mut seen = Vec::new();
            for call in 0..200 {
                let own = (call * 10 + rank.rank()) as f32;
                if call % 3 == 0 {
                    let mut whole = device.alloc(3).unwrap();
                    rank.all_gather(device, &device.upload(&[own]).unwrap(), 1, &mut whole).unwrap();
                    seen.extend(values(device, &whole, 3));
                } else {
                    let mut buf = device.upload(&[own]).unwrap();
                    rank.all_reduce(device, &mut buf, 1).unwrap();
                    seen.extend(values(device, &buf, 1));
                }
            }
            seen
        });
        let expected: Vec<f32> = (0..200)
            .flat_map(|call| {
                let base = (call * 10) as f32;
                if call % 3 == 0 { vec![base, base + 1.0, base + 2.0] } else { vec![3.0 * base + 3.0] }
            })
            .collect();
        assert!(sums.iter().all(|seen| *seen == expected));
    }

    #[test]
    fn parts_of_different_lengths_follow_each_other() {
        let wholes = ranks(3, |rank, device| {
            let own = rank.rank() as f32;
            let part = device.upload(&[own, own + 0.5, own + 0.75]).unwrap();
            let mut whole = device.alloc(6).unwrap();
            rank.all_gather_parts(device, &part, &[2, 0, 3], &mut whole).unwrap();
            values(device, &whole, 6)
        });
        assert!(wholes.iter().all(|whole| *whole == [0.0, 0.5, 2.0, 2.5, 2.75, 0.0]), "{wholes:?}");
        let errors = ranks(2, |rank, device| {
            let (part, mut whole) = (device.alloc(4).unwrap(), device.alloc(4).unwrap());
            let lens = if rank.rank() == 0 { [2, 1] } else { [1, 2] };
            rank.all_gather_parts(device, &part, &lens, &mut whole).unwrap_err().to_string()
        });
        for error in errors {
            assert!(error.contains("all_gather of 2+1 elements, and all_gather of 1+2"), "{error}");
        }
    }

    #[test]
    fn ranks_that_do_different_things_all_learn_it() {
        let errors = ranks(2, |rank, device| {
            let mut buf = device.alloc(8).unwrap();
            rank.all_reduce(device, &mut buf, 4 + rank.rank()).unwrap_err().to_string()
        });
        for error in errors {
            assert!(error.contains("all_reduce of 4 elements, and all_reduce of 5"), "{error}");
        }
    }

    #[test]
    fn a_rank_that_fails_keeps_nobody_waiting_and_the_next_pass_works() {
        let group = RankGroup::new(2);
        let handles = InProcess::ranks(&group);
        let device = CpuDevice::new(1).unwrap();
        let mut buf = device.upload(&[1.0]).unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                let device = CpuDevice::new(1).unwrap();
                let mut buf = device.upload(&[1.0]).unwrap();
                handles[0].all_reduce(&device, &mut buf, 1).unwrap_err().to_string()
            });
            // Longer than its buffer: the call fails before it brings anything.
            handles[1].all_reduce(&device, &mut buf, 2).unwrap_err();
            assert!(waiting.join().unwrap().contains("rank 1"), "says who");
        });
        assert!(handles[1].all_reduce(&device, &mut buf, 1).is_err(), "the pass is over for all");
        group.reset();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let device = CpuDevice::new(1).unwrap();
                let mut buf = device.upload(&[1.0]).unwrap();
                handles[0].all_reduce(&device, &mut buf, 1).unwrap();
            });
            handles[1].all_reduce(&device, &mut buf, 1).unwrap();
        });
        assert_eq!(values(&device, &buf, 1), [2.0]);
    }
}
