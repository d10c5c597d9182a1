//! Rotary settings of `config.json`, in the spellings they have had.

use kvdock_kernels::RopeScaling;

use super::config::{EXTENT, MAX_EXTENT, NUMBER, extent, positive};
use crate::ModelError;
use crate::hf::JsonFile;

/// `rope_parameters.KEY` (newer files), else `rope_scaling.KEY`, else `KEY` itself.
fn spellings(key: &str) -> [String; 3] {
    [format!("rope_parameters.{key}"), format!("rope_scaling.{key}"), key.to_owned()]
}

/// A number above 0 under any spelling of `key`.
pub(crate) fn number(file: &JsonFile, key: &str) -> Result<Option<f64>, ModelError> {
    for key in spellings(key) {
        let found = file.optional(&key, NUMBER, |value| positive(value.as_f64()))?;
        if found.is_some() {
            return Ok(found);
        }
    }
    Ok(None)
}

/// YaRN's mscale keys, of which 0 means none.
pub(crate) fn mscale(file: &JsonFile, key: &str) -> Result<Option<f64>, ModelError> {
    for key in spellings(key) {
        let found = file.optional(&key, "a number of at least 0", |value| {
            value.as_f64().filter(|number| number.is_finite() && *number >= 0.0)
        })?;
        if found.is_some() {
            return Ok(found.filter(|number| *number > 0.0));
        }
    }
    Ok(None)
}

/// YaRN's factor on attention for an mscale.
pub(crate) fn yarn_factor(factor: f64, mscale: f64) -> f64 {
    if factor > 1.0 { 0.1 * mscale * factor.ln() + 1.0 } else { 1.0 }
}

/// The longest sequence: YaRN stretches the context that the model was trained with at first. `positions` is
/// `max_position_embeddings`.
pub(crate) fn context(positions: usize, scaling: &RopeScaling) -> usize {
    match scaling {
        RopeScaling::Yarn { factor, original_context, .. } => {
            positions.max(((original_context * factor) as usize).min(MAX_EXTENT))
        }
        _ => positions,
    }
}

/// The factor on cosines and sines that YaRN's keys give, if any.
fn attention_factor(file: &JsonFile, factor: f64) -> Result<Option<f64>, ModelError> {
    let given = number(file, "attention_factor")?;
    if given.is_some() {
        return Ok(given);
    }
    Ok(match (mscale(file, "mscale")?, mscale(file, "mscale_all_dim")?) {
        (Some(one), Some(all)) => Some(yarn_factor(factor, one) / yarn_factor(factor, all)),
        _ => None,
    })
}

fn truncate(file: &JsonFile) -> Result<Option<bool>, ModelError> {
    for key in spellings("truncate") {
        let found = file.optional(&key, "true or false", |value| value.as_bool())?;
        if found.is_some() {
            return Ok(found);
        }
    }
    Ok(None)
}

/// How frequencies are stretched. `positions` is `max_position_embeddings`.
pub(crate) fn scaling(file: &JsonFile, positions: usize) -> Result<RopeScaling, ModelError> {
    let mut kind = None;
    for section in ["rope_parameters", "rope_scaling"] {
        for key in ["rope_type", "type"] {
            let key = format!("{section}.{key}");
            if kind.is_none()
                && let Some(found) = file.optional(&key, "a text", |value| value.as_str())?
            {
                kind = Some((key, found));
            }
        }
    }
    let Some((key, kind)) = kind else {
        return Ok(RopeScaling::None);
    };
    let required = |name: &str| {
        number(file, name)?.ok_or_else(|| {
            let section = key.split('.').next().unwrap_or_default();
            file.key_error(&format!("{section}.{name}"), NUMBER, "no such key")
        })
    };
    let original = || -> Result<f64, ModelError> {
        for key in spellings("original_max_position_embeddings") {
            let found = file.optional(&key, EXTENT, |value| extent(value.as_u64()))?;
            if let Some(found) = found {
                return Ok(found as f64);
            }
        }
        Ok(positions as f64)
    };
    Ok(match kind {
        "default" => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: required("factor")? },
        "llama3" => RopeScaling::Llama3 {
            factor: required("factor")?,
            low_freq_factor: required("low_freq_factor")?,
            high_freq_factor: required("high_freq_factor")?,
            original_context: original()?,
        },
        "yarn" => {
            let factor = required("factor")?;
            RopeScaling::Yarn {
                factor,
                original_context: original()?,
                beta_fast: number(file, "beta_fast")?.unwrap_or(32.0),
                beta_slow: number(file, "beta_slow")?.unwrap_or(1.0),
                attention_factor: attention_factor(file, factor)?,
                truncate: truncate(file)?.unwrap_or(true),
            }
        }
        other => {
            return Err(file.key_error(&key, "one of default, linear, llama3, yarn", format!("{other:?}")));
        }
    })
}
