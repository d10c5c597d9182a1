//! What a peer says of itself.

use std::sync::Arc;

use kvdock_rdma::{DeviceInfo, Priorities, RemoteBuffer, format_gid};
use serde::{Deserialize, Serialize};

/// Memory of a peer that may be read and written.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Range {
    /// First address, in the peer's numbering.
    pub addr: u64,
    /// Bytes.
    pub length: u64,
    /// Over RDMA: its keys for the peer's own work, one a device.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lkey: Vec<u32>,
    /// Name; over RDMA a place such as `cpu:0`.
    #[serde(default)]
    pub name: String,
    /// Over RDMA: its keys for work of others, one a device.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rkey: Vec<u32>,
}

/// A network device of a peer that is reached by RDMA.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// Its GID: 16 bytes in hex with colons.
    #[serde(default)]
    pub gid: String,
    /// Its number on InfiniBand.
    #[serde(default)]
    pub lid: u16,
    /// Its name.
    pub name: String,
}

/// Descriptor of a peer. The members stand in the order in which official peers write them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Descriptor {
    /// Memory that may be read and written.
    #[serde(default)]
    pub buffers: Vec<Range>,
    /// Devices by which RDMA reaches it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<Device>,
    /// The peer's name.
    pub name: String,
    /// Over RDMA: which devices are near which memory.
    #[serde(default, skip_serializing_if = "Priorities::is_empty")]
    pub priority_matrix: Priorities,
    /// `tcp` or `rdma`; builds that speak several write a list.
    pub protocol: Protocols,
    /// Of another transport; empty.
    #[serde(default)]
    pub rdma_server_name: String,
    /// Host of the data port; releases before 0.3.13 do not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tcp_data_host: Option<String>,
    /// Port of the data plane over TCP; 0 for none.
    #[serde(default, skip_serializing_if = "is_none")]
    pub tcp_data_port: u16,
    /// Version of the data plane's protocol; releases before 0.3.12 do not say it, and speak 1.
    #[serde(default = "one", skip_serializing_if = "is_none")]
    pub tcp_proto_version: u32,
    /// When it was written, for a person.
    #[serde(default)]
    pub timestamp: String,
}

fn one() -> u32 {
    1
}

fn is_none<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// One protocol or several.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Protocols {
    /// One.
    One(String),
    /// Several.
    Several(Vec<String>),
}

impl Descriptor {
    /// Of a peer that is reached by TCP.
    pub fn tcp(name: &str, host: &str, port: u16, buffers: Vec<Range>) -> Descriptor {
        Descriptor {
            buffers,
            devices: Vec::new(),
            name: name.to_owned(),
            priority_matrix: Priorities::new(),
            protocol: Protocols::One("tcp".to_owned()),
            rdma_server_name: String::new(),
            tcp_data_host: Some(host.to_owned()),
            tcp_data_port: port,
            tcp_proto_version: 2,
            timestamp: timestamp(std::time::SystemTime::now()),
        }
    }

    /// Of a peer that is reached by RDMA.
    pub fn rdma(name: &str, devices: &[DeviceInfo], priorities: &Priorities, buffers: Vec<Range>) -> Descriptor {
        let device =
            |device: &DeviceInfo| Device { gid: format_gid(&device.gid), lid: device.lid, name: device.name.clone() };
        Descriptor {
            buffers,
            devices: devices.iter().map(device).collect(),
            name: name.to_owned(),
            priority_matrix: priorities.clone(),
            protocol: Protocols::One("rdma".to_owned()),
            rdma_server_name: String::new(),
            tcp_data_host: None,
            tcp_data_port: 0,
            tcp_proto_version: 0,
            timestamp: timestamp(std::time::SystemTime::now()),
        }
    }

    fn speaks(&self, protocol: &str) -> bool {
        match &self.protocol {
            Protocols::One(one) => one == protocol,
            Protocols::Several(list) => list.iter().any(|one| one == protocol),
        }
    }

    /// Whether TCP reaches it.
    pub fn speaks_tcp(&self) -> bool {
        self.speaks("tcp")
    }

    /// The peer as the RDMA transport sees it; none when RDMA does not reach it. What lacks a key for a device is left out.
    pub fn over_rdma(&self) -> Option<Arc<kvdock_rdma::Peer>> {
        if !self.speaks("rdma") || self.devices.is_empty() {
            return None;
        }
        let buffers = self.buffers.iter().filter(|buffer| buffer.rkey.len() == self.devices.len());
        let buffer = |buffer: &Range| RemoteBuffer {
            address: buffer.addr,
            len: buffer.length,
            place: buffer.name.clone(),
            keys: buffer.rkey.clone(),
        };
        Some(Arc::new(kvdock_rdma::Peer {
            server: self.name.clone(),
            devices: self.devices.iter().map(|device| device.name.clone()).collect(),
            buffers: buffers.map(buffer).collect(),
            priorities: self.priority_matrix.clone(),
        }))
    }

    /// Whether a range lies inside of one buffer.
    pub fn holds(&self, address: u64, len: u64) -> bool {
        let Some(end) = address.checked_add(len) else { return false };
        self.buffers.iter().any(|buffer| {
            address >= buffer.addr && buffer.addr.checked_add(buffer.length).is_some_and(|last| end <= last)
        })
    }

    pub(super) fn check(&self) -> Result<(), String> {
        if !self.speaks_tcp() && self.over_rdma().is_none() {
            return Err(format!("peer {} speaks {:?}; this version speaks tcp and rdma", self.name, self.protocol));
        }
        if self.speaks_tcp() && self.tcp_data_port == 0 {
            return Err(format!("peer {} names no data port", self.name));
        }
        Ok(())
    }
}

/// Date and time in UTC, as in `2026-11-29 16:05:37.606292`.
fn timestamp(now: std::time::SystemTime) -> String {
    let since = now.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let (days, rest) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    // Counted in years that begin in March, in cycles of 400 years.
    let shifted = days + 719_468;
    let (cycle, day) = (shifted / 146_097, shifted % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let in_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * in_year + 2) / 153;
    let date = in_year - (153 * month + 2) / 5 + 1;
    let (month, carry) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let year = year + cycle * 400 + carry;
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{year:04}-{month:02}-{date:02} {hour:02}:{minute:02}:{second:02}.{:06}", since.subsec_micros())
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;

    fn capture(name: &str) -> Vec<u8> {
        std::fs::read(std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/captures").join(name)).unwrap()
    }

    #[test]
    fn recorded_descriptors_are_read_and_written_to_the_same_bytes() {
        for number in 3..=7 {
            let request = capture(&format!("metadata/http-0{number}.req.txt"));
            let text = std::str::from_utf8(&request).unwrap();
            let body = text.split_once("\r\n\r\n").unwrap().1;
            let descriptor: Descriptor = serde_json::from_str(body).unwrap();
            assert_eq!(serde_json::to_string(&descriptor).unwrap(), body);
            assert!(descriptor.check().is_ok());
        }
    }

    #[test]
    fn a_descriptor_needs_little_and_what_is_unknown_is_ignored() {
        let text = r#"{"name":"a:1","protocol":["rdma","tcp"],"tcp_data_port":7,"metadata_version":3,"buffers":[{"addr":16,"length":8,"rkey":[1]}]}"#;
        let descriptor: Descriptor = serde_json::from_str(text).unwrap();
        assert!(descriptor.check().is_ok());
        assert_eq!(descriptor.tcp_proto_version, 1);
        assert!(descriptor.holds(16, 8) && descriptor.holds(20, 4));
        for (address, len) in [(15, 2), (20, 5), (24, 1), (u64::MAX, 2)] {
            assert!(!descriptor.holds(address, len), "{address} {len}");
        }
        let rdma: Descriptor = serde_json::from_str(r#"{"name":"a","protocol":"rdma","devices":[]}"#).unwrap();
        assert!(rdma.check().unwrap_err().contains("rdma"), "it has no device");
    }

    #[test]
    fn a_descriptor_over_rdma_is_written_and_read_as_peers_do() {
        let text = concat!(
            r#"{"buffers":[{"addr":4096,"length":8192,"lkey":[1,2],"name":"cpu:0","rkey":[3,4]},"#,
            r#"{"addr":65536,"length":1,"lkey":[5],"name":"cpu:0","rkey":[6]}],"#,
            r#""devices":[{"gid":"00:00:00:00:00:00:00:00:00:00:ff:ff:0a:4d:00:01","lid":0,"name":"mlx5_0"},"#,
            r#"{"gid":"00:00:00:00:00:00:00:00:00:00:ff:ff:0a:4d:00:02","lid":7,"name":"mlx5_1"}],"#,
            r#""name":"10.0.0.1:12345","priority_matrix":{"cpu:0":[["mlx5_0"],["mlx5_1"]]},"protocol":"rdma","#,
            r#""rdma_server_name":"","timestamp":"2026-11-29 16:05:37.606292"}"#
        );
        let mut descriptor: Descriptor = serde_json::from_str(text).unwrap();
        assert!(descriptor.check().is_ok() && !descriptor.speaks_tcp());
        let peer = descriptor.over_rdma().unwrap();
        assert_eq!((peer.server.as_str(), peer.devices.len()), ("10.0.0.1:12345", 2));
        assert_eq!(peer.buffers.len(), 1, "one lacks a key");
        assert_eq!((peer.buffers[0].address, &peer.buffers[0].keys[..]), (4096, &[3, 4][..]));
        descriptor.tcp_proto_version = 0;
        assert_eq!(serde_json::to_string(&descriptor).unwrap(), text);
    }

    #[test]
    fn timestamps_are_dates_in_utc() {
        let at = |seconds: u64| timestamp(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(0), "1970-01-01 00:00:00.000000");
        assert_eq!(at(951_868_799), "2000-02-29 23:59:59.000000");
        assert_eq!(at(1_795_968_337), "2026-11-29 16:05:37.000000");
    }
}
