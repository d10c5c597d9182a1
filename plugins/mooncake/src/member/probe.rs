//! Which release the master is of. It says the same version whatever it is, so its functions are tried one by one.

use std::time::Duration;

use kvdock_plugin_api::{Error, ErrorKind, LogLevel, Result};

use super::{Member, RPC_TIME, error_of};
use crate::config::Config;
use crate::limit::Limit;
use crate::rpc::RpcError;
use crate::store::figures;
use crate::wire::rpc;
use crate::wire::types::{ObjectMeta, ReplicaType, ReplicateConfig, Segment};

/// What a master of this protocol says of itself.
const VERSION: &str = "2.0.0";
/// A name that no object has.
const NOTHING: &str = "kvdock/probe";

/// Looks whether the master is of a release that this client speaks to.
///
/// # Errors
/// When it can't be reached, or is of another release; the text says which it seems to be.
pub(super) fn probe(member: &Member, limit: &Limit<'_>) -> Result<()> {
    let master = &member.master;
    let limit = limit.at_most(RPC_TIME);
    let address = &master.address().to_string();
    let version =
        master.call::<rpc::ServiceReady>(&rpc::NoArguments, &limit).map_err(|error| refuse(address, &error))?;
    match version {
        Ok(version) if version == VERSION => {}
        Ok(version) => {
            let text = format!(
                "master {address} speaks protocol {version}; this client speaks {VERSION}, as releases 0.3.13 and 0.3.14 do"
            );
            return Err(Error::new(ErrorKind::Unavailable, text));
        }
        Err(code) => {
            return Err(
                Error::new(ErrorKind::Unavailable, format!("master {address} is not ready: {code}")).retryable()
            );
        }
    }
    let tenant = member.tenant.as_str();
    // A release up to 0.3.11 has no tenants and refuses the arguments.
    let found = master.call::<rpc::ExistKey>(&(NOTHING, tenant), &limit);
    check(address, "0.3.11 or older", found)?;
    // 0.3.12 answers with another type of replica.
    check(address, "0.3.12", master.call::<rpc::GetReplicaList>(&(NOTHING, tenant), &limit))?;
    // The arguments of these are of one release each; none of the calls does anything.
    let config = ReplicateConfig::default();
    let meta = ObjectMeta { key: NOTHING, checksum: None };
    let nowhere = Segment {
        id: member.id,
        name: String::new(),
        base: 0,
        size: 0,
        endpoint: String::new(),
        protocol: "tcp".to_owned(),
        host_id: String::new(),
    };
    let newer = "of a release that this client does not know";
    check(address, newer, master.call::<rpc::PutStart>(&(member.id, "", 0, config.clone(), tenant), &limit))?;
    check(address, newer, master.call::<rpc::PutEnd>(&(member.id, meta, ReplicaType::ALL, tenant), &limit))?;
    check(address, newer, master.call::<rpc::BatchExistKey>(&(Vec::new(), tenant), &limit))?;
    check(address, newer, master.call::<rpc::BatchGetReplicaList>(&(Vec::new(), tenant), &limit))?;
    check(
        address,
        newer,
        master.call::<rpc::BatchPutStart>(&(member.id, Vec::new(), Vec::new(), config, tenant), &limit),
    )?;
    check(address, newer, master.call::<rpc::BatchPutEnd>(&(member.id, Vec::new(), ReplicaType::ALL, tenant), &limit))?;
    check(
        address,
        newer,
        master.call::<rpc::BatchPutRevoke>(&(member.id, Vec::new(), ReplicaType::ALL, tenant), &limit),
    )?;
    check(address, newer, master.call::<rpc::BatchRemove>(&(Vec::new(), false, tenant), &limit))?;
    check(address, newer, master.call::<rpc::MountSegment>(&(nowhere, member.id), &limit))?;
    member.host.log(LogLevel::Info, "member", &format!("master {address} speaks as release 0.3.13 does"));
    Ok(())
}

fn refuse(address: &str, error: &RpcError) -> Error {
    match error {
        RpcError::Incompatible(what) => Error::new(
            ErrorKind::Unavailable,
            format!(
                "master {address} is of a release that this client does not know; it speaks to 0.3.13 and 0.3.14 ({what})"
            ),
        ),
        error => error_of(error),
    }
}

/// An answer of any kind is good; one that can't be read tells the release.
fn check<T>(address: &str, release: &str, answer: Result<T, RpcError>) -> Result<()> {
    match answer {
        Ok(_) => Ok(()),
        Err(RpcError::Incompatible(what)) => Err(Error::new(
            ErrorKind::Unavailable,
            format!(
                "master {address} is {release}; this client speaks to 0.3.13 and 0.3.14, so the master has to be updated ({what})"
            ),
        )),
        Err(error) => Err(error_of(&error)),
    }
}

/// Waits until the master knows a segment.
pub(super) fn wait_for_segment(member: &Member, config: &Config, limit: &Limit<'_>) -> Result<()> {
    let master = member.master.address();
    loop {
        let seen = figures::segments(master.host(), config.metrics_port, limit);
        if seen.as_ref().is_ok_and(|text| !text.trim().is_empty()) {
            return Ok(());
        }
        if limit.left().is_err() {
            let why = seen.err().unwrap_or_else(|| "it knows none".to_owned());
            let text = format!("check_server: master {master} has no segment in time: {why}");
            return Err(Error::new(ErrorKind::TimedOut, text).retryable());
        }
        std::thread::sleep(Duration::from_millis(500).min(limit.left().unwrap_or_default()));
    }
}
