//! From logits to tokens.

use kvdock_kernels::{Buf, KernelError, SampleRow, Sampled};

use super::super::device::{CudaDevice, product, size};
use super::super::driver::Arg;
use super::super::memory::{Block, Queue};
use super::super::module::Extent;
use super::super::units::Unit;
use super::{read, write};

/// What kernels give for a row with a value that is no number.
const NOT_A_NUMBER: u32 = u32::MAX;
/// What kernels give for a row without a token that may be chosen.
const NOTHING_LEFT: u32 = u32::MAX - 1;

fn floats(values: impl Iterator<Item = f32>) -> Vec<u32> {
    values.map(f32::to_bits).collect()
}

impl CudaDevice {
    /// [`kvdock_kernels::Device::sample`].
    pub(in super::super) fn choose_tokens(
        &self,
        logits: &mut Buf,
        vocab: usize,
        rows: &[SampleRow<'_>],
    ) -> Result<Vec<Sampled>, KernelError> {
        let op = "sample";
        let need = product(op, &[rows.len(), vocab])?;
        let all = write(self.floats(op, "logits", logits, need)?, need);
        if rows.is_empty() {
            return Ok(Vec::new());
        }
        for (index, row) in rows.iter().enumerate() {
            let mut named = row.counts.iter().map(|(token, _)| token).chain(row.biases.iter().map(|(token, _)| token));
            if let Some(token) = named.find(|token| **token as usize >= vocab) {
                return Err(KernelError::Index { op, row: index, index: *token, rows: vocab });
            }
        }
        let queue = self.order.enter();
        let vocab_arg = size(op, "vocabulary", vocab)?;
        self.penalise(op, (all, vocab_arg), rows, &queue)?;
        self.bias(op, (all, vocab_arg), rows, &queue)?;
        let send = |words: Vec<u32>| -> Result<(Block, Arg), KernelError> {
            let block = self.send_words(op, &words, &queue)?;
            let arg = read(block.at(), words.len());
            Ok((block, arg))
        };
        let (_temperatures, temperatures) = send(floats(rows.iter().map(|row| row.temperature)))?;
        let (_top_ks, top_ks) = send(rows.iter().map(|row| row.top_k).collect())?;
        let (_top_ps, top_ps) = send(floats(rows.iter().map(|row| row.top_p)))?;
        let (_min_ps, min_ps) = send(floats(rows.iter().map(|row| row.min_p)))?;
        let uniforms: Vec<u64> = rows.iter().map(|row| row.uniform.to_bits()).collect();
        let uniforms = self.send_addresses(op, &uniforms, &queue)?;
        let ids = self.room(rows.len())?;
        let args = [
            all,
            vocab_arg,
            temperatures,
            top_ks,
            top_ps,
            min_ps,
            Arg::read(uniforms.at(), 8 * rows.len()),
            write(ids.at(), rows.len()),
        ];
        // SAFETY: every array has an entry for each row, and the buffer has room for the rows.
        unsafe { self.run(Unit::Sampling, "sample", Extent::line(rows.len(), 256), &args)? };
        let mut chosen = Vec::with_capacity(rows.len());
        self.download(op, ids.at(), 4 * rows.len(), |bytes| {
            chosen.extend(bytes.as_chunks::<4>().0.iter().map(|id| match u32::from_le_bytes(*id) {
                NOT_A_NUMBER => Sampled::NotANumber,
                NOTHING_LEFT => Sampled::NothingLeft,
                token => Sampled::Token(token),
            }));
        })?;
        Ok(chosen)
    }

    fn penalise(
        &self,
        op: &'static str,
        (logits, vocab): (Arg, Arg),
        rows: &[SampleRow<'_>],
        queue: &Queue,
    ) -> Result<(), KernelError> {
        let entries = |(index, row): (usize, &SampleRow<'_>)| {
            row.counts.iter().flat_map(move |(token, count)| [index as u32, *token, *count]).collect::<Vec<_>>()
        };
        let words: Vec<u32> = rows.iter().enumerate().flat_map(entries).collect();
        if words.is_empty() {
            return Ok(());
        }
        let penalties = floats(rows.iter().flat_map(|row| row.penalties));
        let (list, factors) = (self.send_words(op, &words, queue)?, self.send_words(op, &penalties, queue)?);
        let count = words.len() / 3;
        let args = [
            logits,
            vocab,
            read(list.at(), words.len()),
            read(factors.at(), penalties.len()),
            size(op, "tokens with penalties", count)?,
        ];
        // SAFETY: tokens and rows have been checked.
        unsafe { self.run(Unit::Sampling, "penalise", Extent::line(count.div_ceil(256), 256), &args) }
    }

    fn bias(
        &self,
        op: &'static str,
        (logits, vocab): (Arg, Arg),
        rows: &[SampleRow<'_>],
        queue: &Queue,
    ) -> Result<(), KernelError> {
        let entries = rows.iter().enumerate().flat_map(|(index, row)| row.biases.iter().map(move |bias| (index, bias)));
        let (places, values): (Vec<[u32; 2]>, Vec<u32>) =
            entries.map(|(row, (token, bias))| ([row as u32, *token], bias.to_bits())).unzip();
        if values.is_empty() {
            return Ok(());
        }
        let (places, count) = (places.concat(), values.len());
        let (list, added) = (self.send_words(op, &places, queue)?, self.send_words(op, &values, queue)?);
        let args = [
            logits,
            vocab,
            read(list.at(), places.len()),
            read(added.at(), count),
            size(op, "tokens with a bias", count)?,
        ];
        // SAFETY: as in `penalise`.
        unsafe { self.run(Unit::Sampling, "bias_logits", Extent::line(count.div_ceil(256), 256), &args) }
    }
}
