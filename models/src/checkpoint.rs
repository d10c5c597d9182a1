//! One face for both kinds of checkpoint.

use std::path::Path;

use crate::ModelError;
use crate::gguf::Gguf;
use crate::hf::HfFolder;
use crate::weights::RawTensor;

/// An opened checkpoint, of either format.
#[derive(Clone, Copy)]
pub enum Checkpoint<'a> {
    /// A GGUF file.
    Gguf(&'a Gguf<'a>),
    /// A Hugging Face folder.
    Hf(&'a HfFolder),
}

impl<'a> Checkpoint<'a> {
    /// The architecture name the checkpoint gives itself.
    ///
    /// # Errors
    /// When it gives none.
    pub fn architecture(&self) -> Result<&'a str, ModelError> {
        match self {
            Checkpoint::Gguf(gguf) => {
                gguf.required("general.architecture", "an architecture's name", |value| value.as_str())
            }
            Checkpoint::Hf(folder) => folder.architecture(),
        }
    }

    /// The file or folder.
    pub fn path(&self) -> &'a Path {
        match self {
            Checkpoint::Gguf(gguf) => gguf.path(),
            Checkpoint::Hf(folder) => folder.path(),
        }
    }

    /// The file that names the architecture.
    pub(crate) fn config_path(&self) -> &'a Path {
        match self {
            Checkpoint::Gguf(gguf) => gguf.path(),
            Checkpoint::Hf(folder) => folder.config().path(),
        }
    }

    /// The tensor `name`, a Hugging Face name. In a GGUF file its counterpart there is looked up.
    ///
    /// # Errors
    /// A tensor of a type that is not supported.
    pub fn optional(&self, name: &str) -> Result<Option<RawTensor<'a>>, ModelError> {
        match self {
            Checkpoint::Gguf(gguf) => Ok(gguf.tensor(&gguf_name(name))),
            Checkpoint::Hf(folder) => folder.tensor(name),
        }
    }

    /// As [`Checkpoint::optional`], but the tensor must be there, of shape `shape`.
    ///
    /// # Errors
    /// [`ModelError::Tensor`] when it is missing or has another shape.
    pub fn required(&self, name: &str, shape: &[usize]) -> Result<RawTensor<'a>, ModelError> {
        let tensor = self.optional(name)?.ok_or_else(|| ModelError::Tensor {
            path: self.path().to_path_buf(),
            tensor: self.name_here(name),
            expected: format!("a tensor of shape {shape:?}"),
            found: "none".to_owned(),
        })?;
        tensor.expect_shape(shape)?;
        Ok(tensor)
    }

    /// How the checkpoint spells the Hugging Face name `name`.
    pub fn name_here(&self, name: &str) -> String {
        match self {
            Checkpoint::Gguf(_) => gguf_name(name),
            Checkpoint::Hf(_) => name.to_owned(),
        }
    }
}

/// GGUF's name for the tensor that Hugging Face calls `name`; names without a counterpart stay.
pub(crate) fn gguf_name(name: &str) -> String {
    let whole = match name {
        "model.embed_tokens.weight" => Some("token_embd.weight"),
        "model.norm.weight" => Some("output_norm.weight"),
        "lm_head.weight" => Some("output.weight"),
        _ => None,
    };
    if let Some(whole) = whole {
        return whole.to_owned();
    }
    let parts = name
        .strip_prefix("model.layers.")
        .and_then(|rest| rest.split_once('.'))
        .and_then(|(layer, rest)| rest.rsplit_once('.').map(|(part, kind)| (layer, part, kind)));
    let Some((layer, part, kind)) = parts else {
        return name.to_owned();
    };
    let part = match part {
        "input_layernorm" => "attn_norm",
        "self_attn.q_proj" => "attn_q",
        "self_attn.k_proj" => "attn_k",
        "self_attn.v_proj" => "attn_v",
        "self_attn.o_proj" => "attn_output",
        "self_attn.q_norm" => "attn_q_norm",
        "self_attn.k_norm" => "attn_k_norm",
        "post_attention_layernorm" => "ffn_norm",
        "mlp.gate_proj" => "ffn_gate",
        "mlp.up_proj" => "ffn_up",
        "mlp.down_proj" => "ffn_down",
        _ => return name.to_owned(),
    };
    format!("blk.{layer}.{part}.{kind}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_their_gguf_counterparts() {
        assert_eq!(gguf_name("lm_head.weight"), "output.weight");
        assert_eq!(gguf_name("model.layers.12.self_attn.k_norm.weight"), "blk.12.attn_k_norm.weight");
        assert_eq!(gguf_name("model.layers.0.self_attn.q_proj.bias"), "blk.0.attn_q.bias");
        assert_eq!(gguf_name("rope_freqs.weight"), "rope_freqs.weight");
    }
}
