//! Which devices are near which memory.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// Places of memory, such as `cpu:0`, each with the devices that are near it and the others.
pub type Priorities = BTreeMap<String, Tiers>;

/// Devices of a place: near ones, others.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tiers(pub Vec<String>, #[serde(default)] pub Vec<String>);

/// The NUMA node of a device by its folder in sysfs; none where there is just one or the system does not say.
pub fn numa_node(ibdev_path: &Path) -> Option<u32> {
    let text = std::fs::read_to_string(ibdev_path.join("device/numa_node")).ok()?;
    text.trim().parse().ok()
}

/// The NUMA nodes of this machine that have memory.
fn nodes() -> Vec<u32> {
    let text = std::fs::read_to_string("/sys/devices/system/node/has_memory").unwrap_or_default();
    let nodes = parse_list(text.trim());
    if nodes.is_empty() { vec![0] } else { nodes }
}

/// `0-2,4` and the like.
fn parse_list(text: &str) -> Vec<u32> {
    let range = |part: &str| -> Option<std::ops::RangeInclusive<u32>> {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse().ok()?..=last.parse().ok()?)
    };
    text.split(',').filter_map(range).flatten().collect()
}

/// The order of devices, by name and NUMA node, for memory of each node.
pub fn priorities(devices: &[(String, Option<u32>)]) -> Priorities {
    let of = |node: u32| {
        let near = |at: &Option<u32>| at.is_none_or(|at| at == node);
        let (first, later): (Vec<_>, Vec<_>) = devices.iter().partition(|(_, at)| near(at));
        let names = |list: Vec<&(String, Option<u32>)>| list.into_iter().map(|(name, _)| name.clone()).collect();
        let (first, later): (Vec<String>, Vec<String>) = (names(first), names(later));
        // A node without a device of its own uses all alike.
        if first.is_empty() { Tiers(later, Vec::new()) } else { Tiers(first, later) }
    };
    nodes().into_iter().map(|node| (format!("cpu:{node}"), of(node))).collect()
}

/// The place of memory, by the node of its first page.
pub fn place(address: *const u8) -> String {
    let mut node: libc::c_int = -1;
    const MPOL_F_NODE: libc::c_ulong = 1;
    const MPOL_F_ADDR: libc::c_ulong = 2;
    let (none, empty) = (std::ptr::null_mut::<libc::c_ulong>(), 0 as libc::c_ulong);
    // SAFETY: the call writes one number; the address is only looked up.
    let result = unsafe {
        libc::syscall(libc::SYS_get_mempolicy, &raw mut node, none, empty, address, MPOL_F_NODE | MPOL_F_ADDR)
    };
    if result == 0 && node >= 0 { format!("cpu:{node}") } else { "cpu:0".to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_nodes_are_read() {
        assert_eq!(parse_list("0"), [0]);
        assert_eq!(parse_list("0-2,5"), [0, 1, 2, 5]);
        assert_eq!(parse_list(""), Vec::<u32>::new());
    }

    #[test]
    fn near_devices_come_first_and_a_node_without_one_uses_all() {
        let devices = [("a".to_owned(), Some(0)), ("b".to_owned(), Some(7)), ("c".to_owned(), None)];
        let found = priorities(&devices);
        let first = found.get("cpu:0").unwrap();
        assert_eq!(first.0, ["a", "c"]);
        assert_eq!(first.1, ["b"]);
        let far = priorities(&devices[1..2]);
        assert_eq!(far.get("cpu:0").unwrap(), &Tiers(vec!["b".to_owned()], Vec::new()));
    }

    #[test]
    fn a_matrix_is_written_as_peers_write_it() {
        let mut matrix = Priorities::new();
        matrix.insert("cpu:0".to_owned(), Tiers(vec!["mlx5_0".to_owned()], vec!["mlx5_1".to_owned()]));
        let text = r#"{"cpu:0":[["mlx5_0"],["mlx5_1"]]}"#;
        assert_eq!(serde_json::to_string(&matrix).unwrap(), text);
        assert_eq!(serde_json::from_str::<Priorities>(text).unwrap(), matrix);
        assert_eq!(serde_json::from_str::<Priorities>(r#"{"x":[["a"]]}"#).unwrap()["x"].0, ["a"]);
    }

    #[test]
    fn memory_of_this_process_has_a_place() {
        let page = vec![1u8; 8192];
        assert!(place(page.as_ptr()).starts_with("cpu:"));
    }
}
