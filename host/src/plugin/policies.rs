//! Cache policies that an attach may change, and SGLang's keys for them inside a backend's own config.

use std::time::Duration;

use serde_json::{Map, Value};

/// Policies to set in the same step as an attach; what is `None` stays.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PolicyChange {
    /// Name of the prefetch policy.
    pub prefetch: Option<String>,
    /// Name of the write policy.
    pub write: Option<String>,
    /// Fewest missing tokens for which storage is asked.
    pub prefetch_threshold: Option<usize>,
    /// Constant part of the `timeout` prefetch policy.
    pub prefetch_timeout_base: Option<Duration>,
    /// Part of the `timeout` prefetch policy for each 1,024 missing tokens.
    pub prefetch_timeout_per_ki_token: Option<Duration>,
}

impl PolicyChange {
    /// Takes SGLang's common keys out of `config`, which a backend does not see, but for those that the backend's own `schema` declares.
    ///
    /// # Errors
    /// Names the key, its value, and what it takes.
    pub fn take_from(&mut self, config: &mut Map<String, Value>, schema: &Value) -> Result<(), String> {
        let declared = |key: &str| schema.get("properties").is_some_and(|properties| properties.get(key).is_some());
        let mut take = |key: &str| if declared(key) { None } else { config.remove(key) };
        let wrong = |key: &str, value: &Value, takes: &str| Err(format!("{key} = {value}: takes {takes}"));
        if let Some(value) = take("prefetch_threshold") {
            // `true` is no number here, though it is one where the key comes from.
            match value.as_u64().and_then(|tokens| usize::try_from(tokens).ok()).filter(|tokens| *tokens > 0) {
                Some(tokens) => self.prefetch_threshold = Some(tokens),
                None => return wrong("prefetch_threshold", &value, "a whole number of tokens above 0"),
            }
        }
        for (key, place) in [
            ("prefetch_timeout_base", &mut self.prefetch_timeout_base),
            ("prefetch_timeout_per_ki_token", &mut self.prefetch_timeout_per_ki_token),
        ] {
            if let Some(value) = take(key) {
                match value.as_f64().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()) {
                    Some(time) => *place = Some(time),
                    None => return wrong(key, &value, "seconds, 0 or more"),
                }
            }
        }
        // Prefix keys go along with every call here, so either value is served.
        if let Some(value) = take("hicache_storage_pass_prefix_keys")
            && !value.is_boolean()
        {
            return wrong("hicache_storage_pass_prefix_keys", &value, "true or false");
        }
        if let Some(value) = take("tp_lcm_size")
            && value.as_u64() != Some(1)
        {
            return wrong("tp_lcm_size", &value, "1: this build does not split heads between ranks");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn take(config: Value) -> Result<(PolicyChange, Map<String, Value>), String> {
        let mut config = config.as_object().unwrap().clone();
        let mut change = PolicyChange::default();
        let schema = json!({"properties": {"tp_lcm_size": {}}});
        change.take_from(&mut config, &schema).map(|()| (change, config))
    }

    #[test]
    fn common_keys_are_taken_out_and_the_rest_stays() {
        let (change, rest) = take(json!({
            "prefetch_threshold": 64, "prefetch_timeout_base": 2, "prefetch_timeout_per_ki_token": 0.5,
            "hicache_storage_pass_prefix_keys": true, "dir": "d", "tp_lcm_size": 8,
        }))
        .unwrap();
        assert_eq!(change.prefetch_threshold, Some(64));
        assert_eq!(change.prefetch_timeout_base, Some(Duration::from_secs(2)));
        assert_eq!(change.prefetch_timeout_per_ki_token, Some(Duration::from_millis(500)));
        assert_eq!(rest, *json!({"dir": "d", "tp_lcm_size": 8}).as_object().unwrap(), "declared by the backend itself");
    }

    #[test]
    fn h21_a_boolean_is_no_number_of_tokens() {
        assert!(take(json!({"prefetch_threshold": true})).unwrap_err().contains("prefetch_threshold = true"));
        assert!(take(json!({"prefetch_timeout_base": -1})).unwrap_err().contains("seconds"));
        assert!(take(json!({"hicache_storage_pass_prefix_keys": 3})).is_err());
    }
}
