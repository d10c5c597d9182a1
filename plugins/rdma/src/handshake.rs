//! What two sides tell one another to connect their queue pairs.

use serde::{Deserialize, Serialize};

/// One side of a connection. It travels as JSON, as Mooncake's peers send it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Description {
    /// `SERVER@DEVICE` of the side that speaks.
    #[serde(default)]
    pub local_nic_path: String,
    /// `SERVER@DEVICE` of the side that is spoken to.
    #[serde(default)]
    pub peer_nic_path: String,
    /// The speaker's number on InfiniBand.
    #[serde(default)]
    pub local_lid: u16,
    /// The speaker's GID: 16 bytes in hex with colons.
    #[serde(default)]
    pub local_gid: String,
    /// Numbers of the speaker's queue pairs.
    #[serde(default)]
    pub qp_num: Vec<u32>,
    /// In a request: the speaker's queue pairs are ready, are the other's? That an answer has it says that the question is understood.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready_ack: Option<bool>,
    /// Why there is no connection; empty when there is one.
    #[serde(default)]
    pub reply_msg: String,
    /// Of other uses.
    #[serde(default)]
    pub payload: String,
}

impl Description {
    /// An answer that refuses.
    pub fn refusal(why: impl Into<String>) -> Description {
        Description { reply_msg: why.into(), ready_ack: Some(false), ..Description::default() }
    }
}

/// `SERVER@DEVICE`.
pub(crate) fn path(server: &str, device: &str) -> String {
    format!("{server}@{device}")
}

/// The two parts of a path.
pub(crate) fn split_path(path: &str) -> Option<(&str, &str)> {
    path.rsplit_once('@').filter(|(server, device)| !server.is_empty() && !device.is_empty())
}

/// A GID as peers write it.
pub fn format_gid(gid: &[u8; 16]) -> String {
    let bytes: Vec<String> = gid.iter().map(|byte| format!("{byte:02x}")).collect();
    bytes.join(":")
}

/// A GID that a peer wrote; none when it is not one.
pub fn parse_gid(text: &str) -> Option<[u8; 16]> {
    let mut gid = [0; 16];
    let mut parts = text.split(':');
    for byte in &mut gid {
        let part = parts.next().filter(|part| (1..=2).contains(&part.len()))?;
        *byte = u8::from_str_radix(part, 16).ok()?;
    }
    parts.next().is_none().then_some(gid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gids_are_written_and_read() {
        let gid = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 77, 0, 1];
        let text = format_gid(&gid);
        assert_eq!(text, "00:00:00:00:00:00:00:00:00:00:ff:ff:0a:4d:00:01");
        assert_eq!(parse_gid(&text), Some(gid));
        for bad in ["", "00", "fe80::1", &format!("{text}:00"), &text.replace("0a", "0x"), &text.replace("0a", "100")] {
            assert_eq!(parse_gid(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_description_of_an_old_peer_has_no_word_about_readiness() {
        let text = r#"{"local_nic_path":"a:1@x","peer_nic_path":"b:2@y","qp_num":[3,4],"reply_msg":"","more":1}"#;
        let old: Description = serde_json::from_str(text).unwrap();
        assert_eq!((old.ready_ack, old.qp_num.as_slice()), (None, &[3, 4][..]));
        let new = Description { ready_ack: Some(false), ..old };
        assert!(serde_json::to_string(&new).unwrap().contains(r#""ready_ack":false"#));
    }

    #[test]
    fn a_server_may_have_any_name() {
        assert_eq!(split_path("user@host:1@mlx5_0"), Some(("user@host:1", "mlx5_0")));
        for bad in ["", "@", "a@", "@b", "ab"] {
            assert_eq!(split_path(bad), None, "{bad}");
        }
    }
}
