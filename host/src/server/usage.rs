//! Token counts as the APIs report them.

use serde_json::{Value, json};

use crate::engine::Usage;

/// Token counts of one request over its prompts and samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tally {
    prompt: u64,
    completion: u64,
    device: u64,
    host: u64,
    storage: u64,
}

impl Tally {
    /// Adds one prompt's samples: the prompt and what was cached of it count once, as the first
    /// sample reports them; completions add up.
    pub(super) fn add(&mut self, samples: &[Usage]) {
        if let Some(first) = samples.first() {
            self.prompt += u64::from(first.prompt_tokens);
            self.device += u64::from(first.cached_device);
            self.host += u64::from(first.cached_host);
            self.storage += u64::from(first.cached_storage);
        }
        self.completion += samples.iter().map(|usage| u64::from(usage.completion_tokens)).sum::<u64>();
    }

    /// The `usage` object of the OpenAI API.
    pub(super) fn openai(&self) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.device + self.host + self.storage},
            "completion_tokens_details": {"reasoning_tokens": 0},
            "reasoning_tokens": 0,
            "kvdock": {"device": self.device, "host": self.host, "storage": self.storage},
        })
    }

    /// SGLang's split by tier; `None` when nothing was cached. `backend` is the attached storage
    /// backend, if there is one.
    pub(super) fn details(&self, backend: Option<&str>) -> Option<Value> {
        if self.device + self.host + self.storage == 0 {
            return None;
        }
        let mut details = json!({"device": self.device, "host": self.host});
        if let Value::Object(map) = &mut details {
            if backend.is_some() || self.storage > 0 {
                map.insert("storage".into(), self.storage.into());
            }
            if let Some(backend) = backend {
                map.insert("storage_backend".into(), backend.into());
            }
        }
        Some(details)
    }
}

/// The tiers of one sample, as the native API reports them.
pub(super) fn native_details(usage: &Usage) -> Value {
    json!({
        "device": usage.cached_device,
        "host": usage.cached_host,
        "storage": usage.cached_storage,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(prompt: u32, completion: u32, tiers: [u32; 3]) -> Usage {
        Usage {
            prompt_tokens: prompt,
            completion_tokens: completion,
            cached_device: tiers[0],
            cached_host: tiers[1],
            cached_storage: tiers[2],
        }
    }

    #[test]
    fn prompts_count_once_and_tiers_add_up() {
        let mut tally = Tally::default();
        tally.add(&[usage(40, 3, [16, 0, 16]), usage(40, 5, [32, 0, 0])]);
        tally.add(&[usage(10, 1, [0, 0, 0])]);
        let json = tally.openai();
        assert_eq!(json["prompt_tokens"], 50);
        assert_eq!(json["completion_tokens"], 9);
        assert_eq!(json["total_tokens"], 59);
        assert_eq!(json["prompt_tokens_details"]["cached_tokens"], 32);
        assert_eq!(json["kvdock"], json!({"device": 16, "host": 0, "storage": 16}));
    }

    #[test]
    fn details_follow_sglang() {
        let mut tally = Tally::default();
        tally.add(&[usage(40, 3, [0, 0, 0])]);
        assert_eq!(tally.details(Some("file")), None);
        tally.add(&[usage(40, 3, [16, 0, 0])]);
        assert_eq!(tally.details(None), Some(json!({"device": 16, "host": 0})));
        assert_eq!(
            tally.details(Some("file")),
            Some(json!({"device": 16, "host": 0, "storage": 0, "storage_backend": "file"}))
        );
    }
}
