//! Keys of `config.json` that several families read.

use kvdock_kernels::{RopeScaling, RopeSpec, RopeStyle};

use crate::ModelError;
use crate::families::dense::config::{EXTENT, MAX_ROTATED, NUMBER, extent, positive};
use crate::families::dense::hf_rope;
use crate::hf::JsonFile;

/// Reads sizes and numbers of one (possibly nested) configuration.
pub(crate) struct Keys<'a>(pub(crate) &'a JsonFile);

impl Keys<'_> {
    pub(crate) fn size(&self, key: &str) -> Result<usize, ModelError> {
        self.0.required(key, EXTENT, |value| extent(value.as_u64()))
    }

    pub(crate) fn size_or(&self, key: &str, default: usize) -> Result<usize, ModelError> {
        Ok(self.optional_size(key)?.unwrap_or(default))
    }

    pub(crate) fn optional_size(&self, key: &str) -> Result<Option<usize>, ModelError> {
        self.0.optional(key, EXTENT, |value| extent(value.as_u64()))
    }

    /// A count that may be 0.
    pub(crate) fn count_or(&self, key: &str, default: usize) -> Result<usize, ModelError> {
        let found = self.0.optional(key, "a count", |value| {
            value.as_u64().filter(|n| *n <= 1 << 24).and_then(|n| usize::try_from(n).ok())
        })?;
        Ok(found.unwrap_or(default))
    }

    pub(crate) fn number(&self, key: &str) -> Result<f64, ModelError> {
        self.0.required(key, NUMBER, |value| positive(value.as_f64()))
    }

    pub(crate) fn number_or(&self, key: &str, default: f64) -> Result<f64, ModelError> {
        Ok(self.0.optional(key, NUMBER, |value| positive(value.as_f64()))?.unwrap_or(default))
    }

    pub(crate) fn flag_or(&self, key: &str, default: bool) -> Result<bool, ModelError> {
        Ok(self.0.optional(key, "true or false", |value| value.as_bool())?.unwrap_or(default))
    }

    pub(crate) fn text(&self, key: &str) -> Result<Option<&str>, ModelError> {
        self.0.optional(key, "a text", |value| value.as_str())
    }

    /// A list of texts.
    pub(crate) fn texts(&self, key: &str) -> Result<Option<Vec<&str>>, ModelError> {
        self.0.optional(key, "a list of texts", |value| value.as_array()?.iter().map(|entry| entry.as_str()).collect())
    }

    /// A list of counts.
    pub(crate) fn counts(&self, key: &str) -> Result<Option<Vec<usize>>, ModelError> {
        self.0.optional(key, "a list of counts", |value| {
            value.as_array()?.iter().map(|entry| usize::try_from(entry.as_u64()?).ok()).collect()
        })
    }

    /// The key's list must have one entry a layer.
    pub(crate) fn one_each<T>(&self, key: &str, list: &[T], layers: usize) -> Result<(), ModelError> {
        if list.len() >= layers {
            return Ok(());
        }
        Err(self.0.key_error(key, &format!("an entry for each of {layers} layers"), format!("{}", list.len())))
    }

    /// What the texts under `key` say of each of `layers` layers; `kinds` are the texts there may be. A kind that nobody
    /// knows is no layer of another kind.
    pub(crate) fn kinds<T: Copy>(
        &self,
        key: &str,
        layers: usize,
        kinds: &[(&str, T)],
    ) -> Result<Option<Vec<T>>, ModelError> {
        let Some(texts) = self.texts(key)? else {
            return Ok(None);
        };
        self.one_each(key, &texts, layers)?;
        let kind = |(layer, text): (usize, &str)| {
            let known = kinds.iter().find(|(name, _)| *name == text);
            known.map(|(_, kind)| *kind).ok_or_else(|| {
                let names: Vec<&str> = kinds.iter().map(|(name, _)| *name).collect();
                let expected = format!("one of {} for each layer", names.join(", "));
                self.0.key_error(key, &expected, format!("{text:?} for layer {layer}"))
            })
        };
        texts.into_iter().take(layers).enumerate().map(kind).collect::<Result<_, _>>().map(Some)
    }

    /// A list of 0 and 1, one a layer.
    pub(crate) fn switches(&self, key: &str, layers: usize) -> Result<Option<Vec<bool>>, ModelError> {
        let list = self.0.optional(key, "a list of 0 and 1", |value| {
            let switch = |entry: &serde_json::Value| entry.as_u64().filter(|n| *n <= 1).map(|n| n == 1);
            value.as_array()?.iter().map(switch).collect::<Option<Vec<bool>>>()
        })?;
        let Some(mut list) = list else {
            return Ok(None);
        };
        self.one_each(key, &list, layers)?;
        list.truncate(layers);
        Ok(Some(list))
    }

    /// The text under `key` is one of `known`, or there is none.
    pub(crate) fn expect(&self, key: &str, known: &[&str]) -> Result<(), ModelError> {
        match self.text(key)? {
            Some(other) if !known.contains(&other) => {
                let known: Vec<String> = known.iter().map(|name| format!("{name:?}")).collect();
                Err(self.unsupported(format!("{key} {other:?} ({} is)", known.join(" or "))))
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn unsupported(&self, what: String) -> ModelError {
        ModelError::Unsupported { path: self.0.path().to_path_buf(), what }
    }

    /// Sizes that do not fit together.
    pub(crate) fn inconsistent(&self, expected: String) -> ModelError {
        ModelError::Damaged { path: self.0.path().to_path_buf(), what: format!("expected {expected}") }
    }

    /// The elements of a head of `head_dim` that are rotated, `share` of them.
    pub(crate) fn rotated(&self, head_dim: usize, share: f64) -> Result<usize, ModelError> {
        let dim = (head_dim as f64 * share) as usize;
        if (2..=head_dim).contains(&dim) && dim.is_multiple_of(2) {
            return Ok(dim);
        }
        Err(self
            .inconsistent(format!("an even number of rotated dimensions, up to the head's {head_dim}, found {dim}")))
    }

    /// The rotary embedding under the usual keys, for `dim` rotated elements of a head. It serves as many positions as
    /// the model has.
    pub(crate) fn rope(&self, style: RopeStyle, dim: usize) -> Result<RopeSpec, ModelError> {
        let positions = self.size("max_position_embeddings")?;
        let scaling = hf_rope::scaling(self.0, positions)?;
        let theta = hf_rope::number(self.0, "rope_theta")?.unwrap_or(10_000.0);
        self.rotary(style, dim, theta, scaling)
    }

    /// A rotary embedding whose base and stretching are known.
    pub(crate) fn rotary(
        &self,
        style: RopeStyle,
        dim: usize,
        theta: f64,
        scaling: RopeScaling,
    ) -> Result<RopeSpec, ModelError> {
        let max_positions = hf_rope::context(self.size("max_position_embeddings")?, &scaling);
        if !(2..=MAX_ROTATED).contains(&dim) || !dim.is_multiple_of(2) {
            let what = format!("an even number of rotated dimensions above 0, up to {MAX_ROTATED}, found {dim}");
            return Err(self.inconsistent(what));
        }
        let spec = RopeSpec { style, offset: 0, dim, theta, scaling, frequency_divisors: None, max_positions };
        match spec.frequencies() {
            Ok(_) => Ok(spec),
            Err(error) => Err(self.inconsistent(format!("settings that a rotary embedding can have: {error}"))),
        }
    }
}
