//! Settings of RDMA.

use kvdock_plugin_api::Result;
use kvdock_rdma::Config;
use serde_json::{Map, Value};

use super::fail;

/// The devices for a rank, and what variables of other clients say.
///
/// # Errors
/// `InvalidConfig`, naming the key or the variable, what it has and what would be right.
pub fn settings(
    instance: &str,
    device_name: &str,
    rank: u64,
    variable: &dyn Fn(&str) -> Option<String>,
) -> Result<Config> {
    let mut config = Config { devices: devices(instance, device_name, rank)?, ..Config::default() };
    let number = |name: &str, from: u64, to: u64| -> Result<Option<u64>> {
        let Some(text) = variable(name).filter(|text| !text.is_empty()) else { return Ok(None) };
        let found = text.parse().ok().filter(|number| (from..=to).contains(number));
        let wrong =
            || fail(instance, "protocol", &format!("{name} is {text:?}; it takes a number from {from} to {to}"));
        found.map(Some).ok_or_else(wrong)
    };
    config.gid_index = number("MC_GID_INDEX", 0, 255)?.map(|index| index as u8);
    if let Some(port) = number("MC_IB_PORT", 1, 255)? {
        config.port = port as u8;
    }
    if let Some(level) = number("MC_IB_SL", 0, 15)? {
        config.service_level = level as u8;
    }
    if let Some(class) = number("MC_IB_TC", 0, 255)? {
        config.traffic_class = class as u8;
    }
    if let Some(bytes) = number("MC_SLICE_SIZE", 4096, 1 << 30)? {
        config.slice = bytes as u32;
    }
    if let Some(times) = number("MC_RETRY_CNT", 0, 100)? {
        config.retries = times as u32;
    }
    Ok(config)
}

/// Names with commas, or an object from ranks to such.
fn devices(instance: &str, text: &str, rank: u64) -> Result<Vec<String>> {
    let list = |text: &str| -> Vec<String> {
        text.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect()
    };
    if !text.trim_start().starts_with('{') {
        return Ok(list(text));
    }
    let wrong = |why: String| {
        let what =
            "it takes names such as \"mlx5_0,mlx5_1\", or an object such as {\"0\": \"mlx5_0\", \"1\": \"mlx5_1\"}";
        fail(instance, "device_name", &format!("{text:?} is not right ({why}); {what}"))
    };
    let map: Map<String, Value> = serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?;
    let value = map.get(&rank.to_string()).ok_or_else(|| wrong(format!("it has nothing for rank {rank}")))?;
    value.as_str().map(list).ok_or_else(|| wrong(format!("what it has for rank {rank} is no text")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str, rank: u64, variables: &[(&str, &str)]) -> Result<Config> {
        let variable =
            |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        settings("mooncake", text, rank, &variable)
    }

    #[test]
    fn devices_are_a_list_or_one_a_rank() {
        let devices = |text, rank| of(text, rank, &[]).unwrap().devices;
        assert!(devices("", 0).is_empty());
        assert_eq!(devices("mlx5_0, mlx5_1,", 3), ["mlx5_0", "mlx5_1"]);
        let ranks = r#"{"0":"mlx5_0","1":"mlx5_1,mlx5_2"}"#;
        assert_eq!(devices(ranks, 1), ["mlx5_1", "mlx5_2"]);
        for (text, rank, says) in [(ranks, 2, "rank 2"), ("{", 0, "mlx5_0"), (r#"{"0":1}"#, 0, "no text")] {
            let error = of(text, rank, &[]).unwrap_err();
            assert!(error.message.starts_with("storage.mooncake.device_name: "), "{error}");
            assert!(error.message.contains(says), "{error}");
        }
    }

    #[test]
    fn variables_of_other_clients_count() {
        let config = of("", 0, &[("MC_GID_INDEX", "3"), ("MC_IB_TC", "160"), ("MC_RETRY_CNT", "2")]).unwrap();
        assert_eq!((config.gid_index, config.traffic_class, config.retries), (Some(3), 160, 2));
        assert_eq!(of("", 0, &[("MC_GID_INDEX", "")]).unwrap(), Config::default());
        let error = of("", 0, &[("MC_IB_PORT", "x")]).unwrap_err();
        assert!(error.message.contains("MC_IB_PORT") && error.message.contains("1 to 255"), "{error}");
    }
}
