//! Recurrences, compressors and hyper-connections.

use kvdock_kernels::ops::{
    Compress, CompressPlan, DeltaInput, DeltaSeq, DeltaSizes, DeltaWeights, HyperMix, HyperOut, STREAMS, StateOps,
    StateSource,
};
use kvdock_kernels::{Buf, KernelError, PagePool};

use super::super::device::{CudaDevice, product, shape, size};
use super::super::driver::{Access, Arg, Touch};
use super::super::module::Extent;
use super::super::units::Unit;
use super::{read, write};

/// Values of a mix.
const MIXES: usize = (2 + STREAMS) * STREAMS;
/// Values of the way back.
const BACKS: usize = (1 + STREAMS) * STREAMS;
/// Elements of a key that the recurrence has a kernel for.
const KEY_DIMS: [usize; 4] = [32, 64, 128, 256];
/// The most taps of a convolution.
const MOST_TAPS: usize = 8;

impl StateOps for CudaDevice {
    fn delta_net(
        &self,
        sizes: DeltaSizes,
        weights: &DeltaWeights<'_>,
        input: &DeltaInput<'_>,
        (pool, layer): (&PagePool, usize),
        seqs: &[DeltaSeq],
        out: &mut Buf,
    ) -> Result<(), KernelError> {
        let op = "delta_net";
        let rows = sizes.check(pool, layer, seqs)?;
        let DeltaSizes { key_heads, value_heads, key_dim, value_dim, kernel } = sizes;
        let (channels, values) = (sizes.channels(), sizes.values());
        let Some(served) = KEY_DIMS.iter().find(|served| key_dim <= **served) else {
            return Err(shape(op, "key_dim", "at most 256".into(), key_dim.to_string()));
        };
        if !(2..=MOST_TAPS).contains(&kernel) {
            return Err(shape(op, "taps of the convolution", format!("2 to {MOST_TAPS}"), kernel.to_string()));
        }
        let pages = self.pages(op, pool)?;
        let floats = |what, buf: &Buf, len: usize| Ok::<_, KernelError>(read(self.floats(op, what, buf, len)?, len));
        let (all, y_len) = (product(op, &[rows, channels])?, product(op, &[rows, values])?);
        let mixed = floats("mixed", input.mixed, all)?;
        let z = floats("z", input.z, y_len)?;
        let a = floats("a", input.a, rows * value_heads)?;
        let b = floats("b", input.b, rows * value_heads)?;
        let y = write(self.floats(op, "out", out, y_len)?, y_len);
        let (mut words, mut saves) = (Vec::new(), Vec::new());
        for seq in seqs {
            let first_save = saves.len() / 2;
            saves.extend(seq.saves.iter().flat_map(|(after, slot)| [*after as u32, *slot]));
            let numbers =
                [seq.first, seq.rows, seq.slot as usize, usize::from(seq.resumes), first_save, seq.saves.len()];
            for number in numbers {
                words.push(u32::try_from(number).map_err(|_| shape(op, "rows", "32 bits".into(), number.to_string()))?);
            }
        }
        let counted = words.len();
        words.extend(saves);
        // Room for what nobody reads, so that the list of saves has an address.
        words.extend([0, 0]);
        let queue = self.order.enter();
        let lists = self.send_words(op, &words, &queue)?;
        let seqs_arg = read(lists.at(), counted);
        let saves_arg = read(lists.at() + 4 * counted as u64, words.len() - counted);
        let convolved = self.room(all)?;
        let slots = Arg::Address(pages.layer(layer));
        let slot_bytes = Arg::U64(pages.page_bytes() as u64);
        let channels_arg = size(op, "channels", channels)?;
        let touches = |tell: &mut dyn FnMut(Touch)| {
            for slot in seqs.iter().flat_map(|seq| seq.saves.iter().map(|(_, slot)| *slot).chain([seq.slot])) {
                tell(pages.page(layer, slot, Access::Write));
            }
        };
        let args = [
            mixed,
            floats("conv", weights.conv, channels * kernel)?,
            slots,
            slot_bytes,
            seqs_arg,
            saves_arg,
            write(convolved.at(), all),
            channels_arg,
            size(op, "taps", kernel)?,
        ];
        let extent = Extent::plane(channels.div_ceil(128), seqs.len(), 128);
        // SAFETY: slots and rows have been checked, and the buffers have room for the rows.
        unsafe { self.run_touching(Unit::Delta, "delta_conv", extent, &args, &touches)? };
        let heads = product(op, &[2, key_heads, rows])?;
        let args = [
            write(convolved.at(), all),
            size(op, "rows", rows)?,
            channels_arg,
            size(op, "key_heads", key_heads)?,
            size(op, "key_dim", key_dim)?,
        ];
        // SAFETY: as above.
        unsafe { self.run(Unit::Delta, "delta_unit", Extent::line(heads.div_ceil(4), 128), &args)? };
        let args = [
            read(convolved.at(), all),
            a,
            b,
            floats("dt_bias", weights.dt_bias, value_heads)?,
            floats("decay", weights.decay, value_heads)?,
            slots,
            slot_bytes,
            Arg::U64(4 * ((kernel - 1) * channels) as u64),
            seqs_arg,
            saves_arg,
            y,
            channels_arg,
            size(op, "key_heads", key_heads)?,
            size(op, "value_heads", value_heads)?,
            size(op, "key_dim", key_dim)?,
            size(op, "value_dim", value_dim)?,
        ];
        let extent = Extent { grid: [value_dim.div_ceil(32), value_heads, seqs.len()], threads: 128, shared: 0 };
        // SAFETY: as above.
        unsafe { self.run_touching(Unit::Delta, &format!("delta_rule_{served}"), extent, &args, &touches)? };
        let args = [
            y,
            z,
            floats("norm", weights.norm, value_dim)?,
            y,
            size(op, "heads", rows * value_heads)?,
            size(op, "value_dim", value_dim)?,
            Arg::F32(weights.eps),
        ];
        let extent = Extent::line((rows * value_heads).div_ceil(4), 128);
        // SAFETY: as above.
        unsafe { self.run(Unit::Norm, "gated_rms_norm", extent, &args) }
    }

    fn compress(
        &self,
        spec: &Compress<'_>,
        plan: &CompressPlan,
        values: &Buf,
        scores: &Buf,
        out: &mut Buf,
    ) -> Result<(), KernelError> {
        let op = "compress";
        let (width, dim) = (spec.width(), spec.dim);
        let positions = self.indices(op, "positions", spec.positions)?;
        let rows = positions.host.len();
        spec.check(plan, rows)?;
        let (pool, layout) = (&spec.states, spec.states.layout());
        let pages = self.pages(op, pool.pool())?;
        let (need, made) = (product(op, &[rows, width])?, product(op, &[plan.rows(), dim])?);
        let out = self.floats(op, "out", out, made)?;
        let states = self.room(2 * need)?;
        let args = [
            read(self.floats(op, "values", values, need)?, need),
            read(self.floats(op, "scores", scores, need)?, need),
            read(self.floats(op, "ape", spec.ape, spec.ratio * width)?, spec.ratio * width),
            positions.arg(),
            write(states.at(), 2 * need),
            size(op, "width", width)?,
            size(op, "ratio", spec.ratio)?,
        ];
        // SAFETY: the buffers have room for the rows.
        unsafe { self.run(Unit::Compress, "compress_states", Extent::line(rows, 256), &args)? };
        let queue = self.order.enter();
        let page_of = |slot: u32| (slot / layout.page_rows as u32, u64::from(slot % layout.page_rows as u32));
        let state_bytes = 8 * width as u64;
        if plan.rows() > 0 {
            let address = |source: &StateSource| match source {
                StateSource::None => 0,
                StateSource::New(row) => states.at() + u64::from(*row) * state_bytes,
                StateSource::Kept(slot) => {
                    let (page, index) = page_of(*slot);
                    pages.page(pool.layer(), page, Access::Read).at + index * state_bytes
                }
            };
            let addresses: Vec<u64> = plan.sources.iter().map(address).collect();
            let sources = self.send_addresses(op, &addresses, &queue)?;
            let args = [
                Arg::read(sources.at(), 8 * addresses.len()),
                write(out, made),
                size(op, "tokens", plan.tokens)?,
                size(op, "dim", dim)?,
                size(op, "width", width)?,
                Arg::U32(u32::from(spec.overlapping)),
            ];
            let touches = |tell: &mut dyn FnMut(Touch)| {
                tell(Touch { at: states.at(), len: 8 * need, access: Access::Read });
                for source in &plan.sources {
                    if let StateSource::Kept(slot) = source {
                        tell(pages.page(pool.layer(), page_of(*slot).0, Access::Read));
                    }
                }
            };
            // SAFETY: the addresses are those of states that have been written, and `out` has room for the rows.
            unsafe {
                self.run_touching(Unit::Compress, "compress_rows", Extent::line(plan.rows(), 256), &args, &touches)?;
            }
        }
        let count = plan.kept.len();
        let (from, to): (Vec<u32>, Vec<u32>) = plan.kept.iter().copied().unzip();
        let (from, to) = (self.send_words(op, &from, &queue)?, self.send_words(op, &to, &queue)?);
        let kept = self.room(product(op, &[count, 2 * width])?)?;
        let args = [
            read(states.at(), 2 * need),
            read(from.at(), count),
            write(kept.at(), count * 2 * width),
            size(op, "width", 2 * width)?,
            size(op, "states", count)?,
        ];
        // SAFETY: the rows are those of the step.
        unsafe { self.run(Unit::Elementwise, "gather_rows", Extent::line(count, 256), &args)? };
        let args = [
            read(kept.at(), count * 2 * width),
            Arg::Address(pages.layer(pool.layer())),
            read(to.at(), count),
            size(op, "width", 2 * width)?,
            size(op, "rows of a page", layout.page_rows)?,
            Arg::U64(pages.page_bytes() as u64),
        ];
        let touches = |tell: &mut dyn FnMut(Touch)| {
            for (_, slot) in &plan.kept {
                tell(pages.page(pool.layer(), page_of(*slot).0, Access::Write));
            }
        };
        // SAFETY: the slots lie within the pool, each of them once.
        unsafe { self.run_touching(Unit::Rows, "rows_write_f32", Extent::line(count, 128), &args, &touches) }
    }

    fn hyper_enter(
        &self,
        streams: &Buf,
        mixes: &Buf,
        mix: &HyperMix<'_>,
        (rows, hidden): (usize, usize),
        input: &mut Buf,
        backs: &mut Buf,
    ) -> Result<(), KernelError> {
        let op = "hyper_enter";
        let all = product(op, &[rows, STREAMS, hidden])?;
        let args = [
            read(self.floats(op, "streams", streams, all)?, all),
            read(self.floats(op, "mixes", mixes, rows * MIXES)?, rows * MIXES),
            read(self.floats(op, "base", mix.base, MIXES)?, MIXES),
            read(self.floats(op, "scale", mix.scale, 3)?, 3),
            write(self.floats(op, "input", input, rows * hidden)?, rows * hidden),
            write(self.floats(op, "backs", backs, rows * BACKS)?, rows * BACKS),
            size(op, "hidden", hidden)?,
            // Columns are brought to a sum of 1 at least once.
            size(op, "rounds", mix.rounds.max(1))?,
            Arg::F32(mix.eps),
            Arg::F32(mix.norm_eps),
        ];
        // SAFETY: the buffers have room for the rows.
        unsafe { self.run(Unit::Hyper, op, Extent::line(rows, 256), &args) }
    }

    fn hyper_leave(
        &self,
        streams: &mut Buf,
        backs: &Buf,
        y: &Buf,
        (rows, hidden): (usize, usize),
    ) -> Result<(), KernelError> {
        let op = "hyper_leave";
        let all = product(op, &[rows, STREAMS, hidden])?;
        let args = [
            write(self.floats(op, "streams", streams, all)?, all),
            read(self.floats(op, "backs", backs, rows * BACKS)?, rows * BACKS),
            read(self.floats(op, "y", y, rows * hidden)?, rows * hidden),
            size(op, "hidden", hidden)?,
        ];
        // SAFETY: the buffers have room for the rows.
        unsafe { self.run(Unit::Hyper, op, Extent::line(rows, 256), &args) }
    }

    fn hyper_head(
        &self,
        streams: &Buf,
        mixes: &Buf,
        mix: &HyperOut<'_>,
        (rows, hidden): (usize, usize),
        out: &mut Buf,
    ) -> Result<(), KernelError> {
        let op = "hyper_head";
        let all = product(op, &[rows, STREAMS, hidden])?;
        let args = [
            read(self.floats(op, "streams", streams, all)?, all),
            read(self.floats(op, "mixes", mixes, rows * STREAMS)?, rows * STREAMS),
            read(self.floats(op, "base", mix.base, STREAMS)?, STREAMS),
            Arg::F32(mix.scale),
            write(self.floats(op, "out", out, rows * hidden)?, rows * hidden),
            size(op, "hidden", hidden)?,
            Arg::F32(mix.eps),
            Arg::F32(mix.norm_eps),
        ];
        // SAFETY: the buffers have room for the rows.
        unsafe { self.run(Unit::Hyper, op, Extent::line(rows, 256), &args) }
    }
}
