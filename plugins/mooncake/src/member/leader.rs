//! The leader of several masters, as etcd knows it.
//!
//! etcd is asked over HTTP, each second, through the JSON gateway that it has had since 3.4: one question, for which a client of its own with
//! a runtime of its own would be much. A fail-over takes its masters ten seconds and more, so a second is soon enough.

use std::sync::Arc;
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use kvdock_plugin_api::LogLevel;
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::json;
use ureq::Agent;

use super::Member;
use crate::limit::Limit;
use crate::net;
use crate::rpc::Address;

/// What stands before the endpoints in the address of a master.
pub const SCHEME: &str = "etcd://";
/// How often etcd is asked.
const LOOK: Duration = Duration::from_secs(1);
/// How long one endpoint may take.
const TIME: Duration = Duration::from_secs(2);
const MOST: u64 = 1 << 20;

/// Who leads, and since which revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct View {
    /// Where the leader listens.
    address: String,
    /// The revision in which it became leader: one that leads anew has forgotten everything, also at the same address.
    revision: String,
}

/// An etcd, in which masters agree who leads.
#[derive(Debug)]
pub struct Election {
    /// The one that answered last comes first.
    endpoints: Mutex<Vec<String>>,
    key: String,
    agent: Agent,
}

#[derive(Debug, Deserialize)]
struct Found {
    /// Missing where there is no such key.
    #[serde(default)]
    kvs: Vec<Entry>,
}

#[derive(Debug, Deserialize)]
struct Entry {
    value: String,
    create_revision: String,
}

impl Election {
    /// The election of a cluster. None for an address without this scheme: that of a single master.
    ///
    /// # Errors
    /// A text that says what is not right with the address.
    pub fn parse(address: &str, cluster: &str) -> Result<Option<Election>, String> {
        let Some(list) = address.strip_prefix(SCHEME) else { return Ok(None) };
        let endpoints: Vec<String> =
            list.split([';', ',']).map(str::trim).filter(|endpoint| !endpoint.is_empty()).map(str::to_owned).collect();
        let wrong = endpoints.iter().find(|endpoint| net::written_address(endpoint).is_none());
        if let Some(wrong) = wrong.map(String::as_str).or_else(|| endpoints.is_empty().then_some("")) {
            return Err(format!(
                "endpoint {wrong:?} is not right; it takes \"etcd://host:2379\", or several hosts as \"etcd://one:2379;two:2379\""
            ));
        }
        let config = Agent::config_builder()
            .timeout_global(Some(TIME))
            // etcd is an address of the cluster; a proxy of the environment is for other things.
            .proxy(None)
            .build();
        let key = format!("mooncake-store/{}/master_view", cluster.trim_end_matches('/'));
        Ok(Some(Election { endpoints: Mutex::new(endpoints), key, agent: config.into() }))
    }

    /// Who leads now. None when nobody does.
    ///
    /// # Errors
    /// A text that says why no endpoint answers.
    pub fn leader(&self, limit: &Limit<'_>) -> Result<Option<View>, String> {
        let endpoints = self.endpoints.lock().clone();
        let mut why = None;
        for endpoint in endpoints {
            let Ok(left) = limit.left() else { break };
            match self.ask(&endpoint, left.min(TIME)) {
                Ok(view) => {
                    let mut known = self.endpoints.lock();
                    known.retain(|other| *other != endpoint);
                    known.insert(0, endpoint);
                    return Ok(view);
                }
                Err(error) => why = Some(format!("etcd at {endpoint}: {error}")),
            }
        }
        Err(why.unwrap_or_else(|| "etcd: no time left to ask it who leads".to_owned()))
    }

    fn ask(&self, endpoint: &str, time: Duration) -> Result<Option<View>, String> {
        let request = self.agent.post(format!("http://{endpoint}/v3/kv/range"));
        let request = request.config().timeout_global(Some(time)).build();
        let question = json!({"key": STANDARD.encode(&self.key)}).to_string();
        let mut answer = request.send(question).map_err(|error| error.to_string())?;
        let text = answer.body_mut().with_config().limit(MOST).read_to_string().map_err(|error| error.to_string())?;
        parse_answer(&text)
    }

    /// Waits for somebody to lead.
    ///
    /// # Errors
    /// A text that says why nobody does.
    pub fn wait(&self, limit: &Limit<'_>) -> Result<(View, Arc<Address>), String> {
        let mut last = None;
        loop {
            let why = match self.leader(limit) {
                Ok(Some(view)) => match Address::parse(&view.address) {
                    Ok(address) => return Ok((view, Arc::new(address))),
                    Err(why) => format!("etcd: {}: {why}", self.key),
                },
                Ok(None) => format!("no master leads: there is no {} in etcd", self.key),
                Err(why) => why,
            };
            let Ok(left) = limit.left() else { return Err(last.unwrap_or(why)) };
            last = Some(why);
            std::thread::sleep(left.min(LOOK / 4));
        }
    }
}

fn parse_answer(text: &str) -> Result<Option<View>, String> {
    let found: Found = serde_json::from_str(text).map_err(|error| format!("its answer can't be read: {error}"))?;
    let Some(entry) = found.kvs.into_iter().next() else { return Ok(None) };
    let address = STANDARD.decode(&entry.value).ok().and_then(|bytes| String::from_utf8(bytes).ok());
    let address = address.ok_or_else(|| format!("it holds {:?}, which is no address", entry.value))?;
    Ok(Some(View { address, revision: entry.create_revision }))
}

impl Member {
    /// Looks who leads, until the member leaves.
    pub(super) fn follow_leaders(&self, election: &Election, mut view: View) {
        let mut trouble = false;
        while !self.pause(LOOK) {
            let found = election.leader(&Limit::within(TIME * 3));
            if let Err(why) = &found
                && !trouble
            {
                // The leader that is known may well be there still.
                self.host.log(LogLevel::Warn, "leader", &format!("{why}; a change of leader would not be noticed"));
            }
            trouble = found.is_err();
            // Between two leaders there is none; the heartbeat says that the last one does not answer.
            let Ok(Some(now)) = found else { continue };
            if now == view {
                continue;
            }
            match Address::parse(&now.address) {
                Ok(address) => {
                    let text = format!("master {} leads now, after {}", now.address, view.address);
                    self.host.log(LogLevel::Warn, "leader", &text);
                    let address = Arc::new(address);
                    self.master.follow(address.clone());
                    self.heart.follow(address);
                    self.wake.notify_all();
                }
                Err(why) => self.host.log(LogLevel::Warn, "leader", &format!("etcd: {}: {why}", election.key)),
            }
            view = now;
        }
    }
}

/// How long to wait at the start for a leader that serves: a fail-over takes about ten seconds.
pub(super) const FIRST: Duration = Duration::from_secs(30);

/// Repeats `work` while a leader that is just taking over refuses connections.
pub(super) fn until_it_serves<T, E>(
    limit: &Limit<'_>,
    is_early: impl Fn(&E) -> bool,
    mut work: impl FnMut() -> Result<T, E>,
) -> Result<T, E> {
    let began = Instant::now();
    loop {
        match work() {
            Err(error) if is_early(&error) && began.elapsed() < FIRST && limit.left().is_ok() => {
                std::thread::sleep(LOOK / 4);
            }
            outcome => return outcome,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_name_endpoints_and_the_key_of_the_cluster() {
        assert!(Election::parse("10.0.0.1:50051", "c").unwrap().is_none());
        let election = Election::parse("etcd://a:1;b:2, c:3", "c/").unwrap().unwrap();
        assert_eq!(*election.endpoints.lock(), ["a:1", "b:2", "c:3"]);
        assert_eq!(election.key, "mooncake-store/c/master_view");
        for wrong in ["etcd://", "etcd://a", "etcd://a:1;b", "etcd://http://a:1"] {
            assert!(Election::parse(wrong, "c").unwrap_err().contains("etcd://host:2379"), "{wrong}");
        }
    }

    #[test]
    fn answers_of_etcd_are_read() {
        // Recorded from etcd 3.4.23.
        let text = r#"{"header":{"cluster_id":"9127722944235663829","member_id":"9223195929454849683","revision":"4","raft_term":"2"},"kvs":[{"key":"bW9vbmNha2Utc3RvcmUvYzEvbWFzdGVyX3ZpZXc=","create_revision":"4","mod_revision":"4","version":"1","value":"MTI3LjAuMC4xOjUzNTkz","lease":"3356204449492029741"}],"count":"1"}"#;
        let view = View { address: "127.0.0.1:53593".to_owned(), revision: "4".to_owned() };
        assert_eq!(parse_answer(text), Ok(Some(view)));
        assert_eq!(parse_answer(r#"{"header":{"revision":"1"}}"#), Ok(None));
        assert!(parse_answer("<html>").unwrap_err().contains("can't be read"));
        assert!(parse_answer(r#"{"kvs":[{"value":"?","create_revision":"1"}]}"#).unwrap_err().contains("no address"));
    }
}
