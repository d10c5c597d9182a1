//! Tiny models as GGUF files.

use std::io;
use std::path::Path;

use kvdock_kernels::{WeightFormat, dequantize};

use super::quantize::encode;
use super::shape::{TinyKind, TinyModel, TinyTensor};
use crate::checkpoint::gguf_name;
use crate::tokenizer::byte_to_char;

const ALIGNMENT: usize = 32;

impl TinyModel {
    /// Writes the model to the GGUF file `path`, its matrices in `format`, its vectors as F32. Of family llama,
    /// the rows of q and k are permuted as that format has them.
    ///
    /// # Errors
    /// When the file cannot be written, or a row is no whole number of blocks of the format.
    pub fn write_gguf(&self, path: &Path, format: WeightFormat) -> io::Result<()> {
        self.write(path, format, false)
    }

    /// Writes the twin of [`TinyModel::write_gguf`]: the same values after they went through `format`,
    /// stored as F32.
    ///
    /// # Errors
    /// As [`TinyModel::write_gguf`].
    pub fn write_gguf_dequantized(&self, path: &Path, format: WeightFormat) -> io::Result<()> {
        self.write(path, format, true)
    }

    fn write(&self, path: &Path, format: WeightFormat, dequantized: bool) -> io::Result<()> {
        let mut writer = Writer::default();
        self.keys(&mut writer);
        for tensor in self.tensors() {
            let values = self.in_gguf_order(&tensor);
            let format = if tensor.shape.len() == 1 { WeightFormat::F32 } else { format };
            let columns = tensor.shape.last().copied().unwrap_or(1);
            let bytes = encode(format, &values, columns)?;
            let (format, bytes) = if dequantized {
                let mut values = vec![0.0; values.len()];
                dequantize(format, &bytes, &mut values).map_err(io::Error::other)?;
                (WeightFormat::F32, encode(WeightFormat::F32, &values, columns)?)
            } else {
                (format, bytes)
            };
            writer.tensor(&gguf_name(&tensor.name), &tensor.shape, format, &bytes);
        }
        std::fs::write(path, writer.finish())
    }

    fn keys(&self, writer: &mut Writer) {
        let arch = self.kind.name();
        writer.text("general.architecture", arch);
        writer.text("general.name", &format!("tiny {arch}"));
        let counts = [
            ("block_count", self.layers),
            ("context_length", self.context),
            ("embedding_length", self.hidden),
            ("feed_forward_length", self.intermediate),
            ("attention.head_count", self.heads),
            ("attention.head_count_kv", self.kv_heads),
            ("attention.key_length", self.head_dim),
            ("attention.value_length", self.head_dim),
            ("rope.dimension_count", self.head_dim),
        ];
        for (name, count) in counts {
            writer.u32(&format!("{arch}.{name}"), count as u32);
        }
        writer.f32(&format!("{arch}.attention.layer_norm_rms_epsilon"), self.eps() as f32);
        writer.f32(&format!("{arch}.rope.freq_base"), self.theta() as f32);

        writer.text("tokenizer.ggml.model", "gpt2");
        writer.text("tokenizer.ggml.pre", "gpt-2");
        let tokens: Vec<String> = (0..=255u8).take(self.vocab).map(|byte| byte_to_char(byte).to_string()).collect();
        writer.texts("tokenizer.ggml.tokens", &tokens);
        writer.i32s("tokenizer.ggml.token_type", &vec![1; tokens.len()]);
        writer.texts("tokenizer.ggml.merges", &[]);
        if let Some(eos) = self.eos {
            writer.u32("tokenizer.ggml.eos_token_id", eos);
        }
        if let Some(template) = &self.chat_template {
            writer.text("tokenizer.chat_template", template);
        }
    }

    /// The values with the rows of q and k as GGUF files of family llama hold them: within a head, row
    /// `half * d/2 + j` goes to `2j + half`.
    fn in_gguf_order(&self, tensor: &TinyTensor) -> Vec<f32> {
        let permuted =
            self.kind == TinyKind::Llama && ["q_proj.", "k_proj."].iter().any(|part| tensor.name.contains(part));
        if !permuted {
            return tensor.values.clone();
        }
        let columns = if tensor.shape.len() == 1 { 1 } else { tensor.shape[1] };
        let (dim, half) = (self.head_dim, self.head_dim / 2);
        let mut values = vec![0.0; tensor.values.len()];
        for (row, source) in tensor.values.chunks_exact(columns).enumerate() {
            let (head, within) = (row / dim, row % dim);
            let target = head * dim + 2 * (within % half) + within / half;
            values[target * columns..][..columns].copy_from_slice(source);
        }
        values
    }
}

/// Puts a GGUF file of version 3 together.
#[derive(Default)]
pub(crate) struct Writer {
    keys: Vec<u8>,
    key_count: u64,
    infos: Vec<u8>,
    tensor_count: u64,
    data: Vec<u8>,
}

impl Writer {
    fn key(&mut self, key: &str, kind: u32) -> &mut Vec<u8> {
        self.key_count += 1;
        put_text(&mut self.keys, key);
        self.keys.extend(kind.to_le_bytes());
        &mut self.keys
    }

    pub(crate) fn u32(&mut self, key: &str, value: u32) {
        self.key(key, 4).extend(value.to_le_bytes());
    }

    #[cfg(test)]
    pub(crate) fn bool(&mut self, key: &str, value: bool) {
        self.key(key, 7).push(value.into());
    }

    pub(crate) fn f32(&mut self, key: &str, value: f32) {
        self.key(key, 6).extend(value.to_le_bytes());
    }

    pub(crate) fn text(&mut self, key: &str, value: &str) {
        put_text(self.key(key, 8), value);
    }

    pub(crate) fn texts(&mut self, key: &str, values: &[String]) {
        let out = self.key(key, 9);
        out.extend(8u32.to_le_bytes());
        out.extend((values.len() as u64).to_le_bytes());
        for value in values {
            put_text(out, value);
        }
    }

    pub(crate) fn i32s(&mut self, key: &str, values: &[i32]) {
        let out = self.key(key, 9);
        out.extend(5u32.to_le_bytes());
        out.extend((values.len() as u64).to_le_bytes());
        out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    }

    pub(crate) fn tensor(&mut self, name: &str, shape: &[usize], format: WeightFormat, bytes: &[u8]) {
        self.tensor_count += 1;
        put_text(&mut self.infos, name);
        self.infos.extend((shape.len() as u32).to_le_bytes());
        for extent in shape.iter().rev() {
            self.infos.extend((*extent as u64).to_le_bytes());
        }
        let kind: u32 = match format {
            WeightFormat::F32 => 0,
            WeightFormat::F16 => 1,
            WeightFormat::Q4_0 => 2,
            WeightFormat::Q4_1 => 3,
            WeightFormat::Q8_0 => 8,
            WeightFormat::Q4_K => 12,
            WeightFormat::Q5_K => 13,
            WeightFormat::Q6_K => 14,
            WeightFormat::BF16 => 30,
        };
        self.infos.extend(kind.to_le_bytes());
        self.infos.extend((self.data.len() as u64).to_le_bytes());
        self.data.extend(bytes);
        self.data.resize(self.data.len().next_multiple_of(ALIGNMENT), 0);
    }

    pub(crate) fn finish(self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend(self.tensor_count.to_le_bytes());
        out.extend(self.key_count.to_le_bytes());
        out.extend(self.keys);
        out.extend(self.infos);
        out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
        out.extend(self.data);
        out
    }
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}
