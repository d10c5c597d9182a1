//! Every exchange that was recorded between published programs: read, and written again to the same bytes.

use std::collections::BTreeSet;
use std::path::Path;

use super::frame::{self, REPLY_HEADER, REQUEST_HEADER, Refusal, Reply, Request};
use super::message::variant;
use super::rpc::{self, Expected, NoArguments};
use super::types::{InMemory, OnDisk, OnFabric, OnLocalDisk, ReplicaStatus};
use super::*;

fn folder(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/captures").join(name)
}

/// Names of the exchanges in a folder, without ending.
fn exchanges(name: &str) -> Vec<String> {
    let entries = std::fs::read_dir(folder(name)).unwrap();
    let names: BTreeSet<String> = entries
        .filter_map(|entry| entry.unwrap().file_name().to_str()?.strip_suffix(".req.bin").map(str::to_owned))
        .collect();
    names.into_iter().collect()
}

fn same_bytes<T: Encode + for<'a> Decode<'a>>(file: &str, body: &[u8]) {
    let hash = type_hash::<T>();
    let (value, form) = decode::<T>(body, hash).unwrap_or_else(|error| panic!("{file}: {error}"));
    assert_eq!(encode(&value, hash, &form), body, "{file}");
}

fn request_frame(file: &str) -> (Request, Vec<u8>) {
    let bytes = std::fs::read(file).unwrap();
    let (header, body) = bytes.split_first_chunk::<REQUEST_HEADER>().unwrap();
    let request = Request::from_bytes(header).unwrap();
    assert_eq!(request.to_bytes(), *header, "{file}");
    assert_eq!(request.body as usize, body.len(), "{file}");
    (request, body.to_vec())
}

fn reply_frame(file: &str) -> (Reply, Vec<u8>) {
    let bytes = std::fs::read(file).unwrap();
    let (header, body) = bytes.split_first_chunk::<REPLY_HEADER>().unwrap();
    let reply = Reply::from_bytes(header).unwrap();
    assert_eq!(reply.to_bytes(), *header, "{file}");
    assert_eq!(reply.body as usize, body.len(), "{file}");
    (reply, body.to_vec())
}

/// A recorded exchange of one function.
fn check<M: Rpc>(file: &str) {
    let path = |end: &str| format!("{file}.{end}.bin");
    let (request, body) = request_frame(&path("req"));
    assert_eq!(request.function, M::id(), "{file}");
    let (reply, answer) = reply_frame(&path("resp"));
    if let Some(refusal) = Refusal::of(reply.error) {
        assert_eq!(refusal, Refusal::Arguments, "{file}");
        assert!(frame::refusal_text(&answer).starts_with("invalid rpc"), "{file}");
        same_bytes::<String>(file, &answer);
        return;
    }
    match M::request_hash() {
        None => assert!(body.is_empty(), "{file}"),
        Some(hash) => {
            let (value, form) = decode::<M::Request<'_>>(&body, hash).unwrap_or_else(|error| panic!("{file}: {error}"));
            assert_eq!(encode(&value, hash, &form), body, "{file}");
            // The form this client sends: nothing but what is needed.
            let short = encode(&value, hash, &Form::default());
            assert!(short.len() <= body.len(), "{file}");
            let (again, _) = decode::<M::Request<'_>>(&short, hash).unwrap();
            assert_eq!(encode(&again, hash, &form), body, "{file}");
        }
    }
    assert_eq!(M::reply_hash(), type_hash::<M::Reply>());
    same_bytes::<M::Reply>(file, &answer);
}

fn check_current(file: &str, method: &str) {
    macro_rules! each {
        ($name:ident) => {
            if method == stringify!($name) {
                return check::<rpc::$name>(file);
            }
        };
    }
    rpc::for_each_rpc!(each);
    panic!("{file}: there is no function {method}");
}

fn method(exchange: &str) -> &str {
    exchange.split('-').nth(1).unwrap()
}

#[test]
fn every_exchange_of_the_current_release_is_read_and_written_to_the_same_bytes() {
    let names = exchanges("rpc");
    assert_eq!(names.len(), 119);
    let mut methods = BTreeSet::new();
    for name in &names {
        let file = folder("rpc").join(name);
        let file = file.to_str().unwrap();
        match name.as_str() {
            "116-NoSuchFunction" => {
                let (reply, answer) = reply_frame(&format!("{file}.resp.bin"));
                assert_eq!(Refusal::of(reply.error), Some(Refusal::Function));
                assert_eq!(frame::refusal_text(&answer), "the rpc function not registered");
                request_frame(&format!("{file}.req.bin"));
            }
            _ => check_current(file, method(name)),
        }
        methods.insert(method(name));
    }
    let mut known = 0;
    macro_rules! each {
        ($name:ident) => {
            known += 1;
            assert!(methods.contains(stringify!($name)), stringify!($name));
        };
    }
    rpc::for_each_rpc!(each);
    assert_eq!(known, 64);
}

#[test]
fn the_shortest_form_of_a_request_is_the_one_that_a_real_master_has_taken() {
    let (_, recorded) = request_frame(folder("rpc/113-ExistKey-no-literal.req.bin").to_str().unwrap());
    let hash = rpc::ExistKey::request_hash().unwrap();
    let (value, form) = decode::<(&str, &str)>(&recorded, hash).unwrap();
    assert_eq!(form, Form::default());
    assert_eq!(encode(&value, hash, &Form::default()), recorded);
}

// Types of older releases.
variant! {
    /// Until 0.3.10.
    pub enum PlaceOf10 { Memory(InMemory) = 0, Disk(OnDisk) = 1, LocalDisk(OnLocalDisk) = 2, }
}
variant! {
    /// In 0.3.11 and 0.3.12.
    pub enum PlaceOf12 { Memory(InMemory) = 0, Fabric(OnFabric) = 1, Disk(OnDisk) = 2, LocalDisk(OnLocalDisk) = 3, }
}
type ReplicaOf10 = (u64, PlaceOf10, ReplicaStatus);
type ReplicaOf12 = (u64, PlaceOf12, ReplicaStatus);
type SegmentOf11 = (Uuid, String, u64, u64, String, String);
type Keys = Vec<String>;

fn check_old<Request: Encode + for<'a> Decode<'a>, Reply: Encode + for<'a> Decode<'a>>(file: &str) {
    same_bytes::<Request>(file, &request_frame(&format!("{file}.req.bin")).1);
    same_bytes::<Reply>(file, &reply_frame(&format!("{file}.resp.bin")).1);
}

/// A struct with more fields than a tuple of this crate has.
macro_rules! wide {
    ($name:ident { $($field:ident: $ty:ty,)+ }) => {
        super::message::messages! {
            #[allow(missing_docs, reason = "fields of an older release")]
            pub struct $name { $($field: $ty,)+ }
        }
    };
}
wide!(Config10 { num: u64, soft: bool, hard: bool, preferred: Vec<String>, one: String, same_node: bool, });
wide!(Config11 {
    num: u64, nof: u64, soft: bool, hard: bool, preferred: Vec<String>, one: String, nofs: Vec<String>, same_node: bool,
    data_type: u8,
});
wide!(Config12 {
    num: u64, nof: u64, soft: bool, hard: bool, preferred: Vec<String>, one: String, nofs: Vec<String>, same_node: bool,
    data_type: u8, host: String, groups: Option<Vec<String>>,
});

#[test]
fn exchanges_of_other_releases_are_read_and_written_to_the_same_bytes() {
    let names = exchanges("other-versions");
    assert_eq!(names.len(), 60);
    for name in &names {
        let file = folder("other-versions").join(name);
        let file = file.to_str().unwrap();
        let release = name.split("-v0.3.").nth(1).unwrap();
        let method = method(name);
        match (release, method) {
            (_, "ServiceReady" | "Ping" | "UnmountSegment") => check_current(file, method),
            ("14", _) => check_current(file, method),
            ("10.post2" | "11.post1", _) => match (release, method) {
                (_, "MountSegment") => check_old::<(SegmentOf11, Uuid), Expected<()>>(file),
                (_, "ReMountSegment") => check_old::<(Vec<SegmentOf11>, Uuid), Expected<()>>(file),
                ("10.post2", "PutStart") => {
                    check_old::<(Uuid, String, u64, Config10), Expected<Vec<ReplicaOf10>>>(file)
                }
                (_, "PutStart") => check_old::<(Uuid, String, u64, Config11), Expected<Vec<ReplicaOf12>>>(file),
                (_, "PutEnd") => check_old::<(Uuid, String, i32), Expected<()>>(file),
                ("10.post2", "GetReplicaList") => check_old::<String, Expected<(Vec<ReplicaOf10>, u64)>>(file),
                (_, "GetReplicaList") => check_old::<String, Expected<(Vec<ReplicaOf12>, u64)>>(file),
                ("10.post2", "BatchPutStart") => {
                    check_old::<(Uuid, Keys, Vec<u64>, Config10), Vec<Expected<Vec<ReplicaOf10>>>>(file)
                }
                (_, "BatchPutStart") => {
                    check_old::<(Uuid, Keys, Vec<u64>, Config11), Vec<Expected<Vec<ReplicaOf12>>>>(file)
                }
                ("10.post2", "BatchPutEnd") => check_old::<(Uuid, Keys), Vec<Expected<()>>>(file),
                (_, "BatchPutEnd") => check_old::<(Uuid, Keys, i32), Vec<Expected<()>>>(file),
                (_, "ExistKey") => check_old::<String, Expected<bool>>(file),
                (_, "BatchExistKey") => check_old::<Keys, Vec<Expected<bool>>>(file),
                ("10.post2", "BatchGetReplicaList") => check_old::<Keys, Vec<Expected<(Vec<ReplicaOf10>, u64)>>>(file),
                (_, "BatchGetReplicaList") => check_old::<Keys, Vec<Expected<(Vec<ReplicaOf12>, u64)>>>(file),
                (_, "Remove") => check_old::<(String, bool), Expected<()>>(file),
                (_, "RemoveAll") => check_old::<bool, i64>(file),
                _ => panic!("{file}"),
            },
            ("12.post1", "PutStart") => {
                check_old::<(Uuid, String, u64, Config12, String), Expected<Vec<ReplicaOf12>>>(file)
            }
            ("12.post1", "PutEnd") => check_old::<(Uuid, String, i32, String), Expected<()>>(file),
            ("12.post1", "GetReplicaList") => check_old::<(String, String), Expected<(Vec<ReplicaOf12>, u64)>>(file),
            ("12.post1", "BatchPutStart") => {
                check_old::<(Uuid, Keys, Vec<u64>, Config12, String), Vec<Expected<Vec<ReplicaOf12>>>>(file)
            }
            ("12.post1", "BatchPutEnd") => check_old::<(Uuid, Keys, i32, String), Vec<Expected<()>>>(file),
            ("12.post1", "BatchGetReplicaList") => {
                check_old::<(Keys, String), Vec<Expected<(Vec<ReplicaOf12>, u64)>>>(file)
            }
            ("12.post1", _) => check_current(file, method),
            _ => panic!("{file}"),
        }
    }
}

#[test]
fn compatible_fields_of_a_later_release_are_skipped() {
    let (_, body) = reply_frame(folder("other-versions/168-GetReplicaList-v0.3.14.resp.bin").to_str().unwrap());
    let (found, form) =
        decode::<<rpc::GetReplicaList as Rpc>::Reply>(&body, rpc::GetReplicaList::reply_hash()).unwrap();
    assert_eq!(found.unwrap().list.len(), 1);
    assert!(form.total != Total::None && !form.compatible.is_empty());
}

#[test]
fn a_reply_without_literal_and_with_any_width_is_read() {
    let value: Vec<Expected<bool>> = vec![Ok(true), Err(ErrorCode::OBJECT_NOT_FOUND)];
    let hash = rpc::BatchExistKey::reply_hash();
    for width in [Width::One, Width::Two, Width::Four, Width::Eight] {
        for literal in [false, true] {
            for total in [Total::None, Total::Two, Total::Four, Total::Eight] {
                let form = Form { literal, width: Some(width), total, compatible: vec![1, 2, 3] };
                let bytes = encode(&value, hash, &form);
                let (read, found) = decode::<Vec<Expected<bool>>>(&bytes, hash).unwrap();
                assert_eq!((&read, &found.compatible), (&value, &form.compatible));
            }
        }
    }
    let long = "x".repeat(300);
    let bytes = encode(&(long.as_str(), ""), rpc::ExistKey::request_hash().unwrap(), &Form::default());
    assert_eq!((bytes[0] & 1, bytes[4]), (1, 0x08), "the width is in the meta byte");
}

#[test]
fn a_message_of_another_type_is_told_from_one_that_is_damaged() {
    let (_, body) = reply_frame(folder("rpc/012-ExistKey-hit.resp.bin").to_str().unwrap());
    let other = decode::<Expected<i64>>(&body, type_hash::<Expected<i64>>()).unwrap_err();
    assert!(matches!(other, Malformed::Type { found: 0x90e8_00d2, .. }), "{other}");
    let short = decode::<Expected<bool>>(&body[..body.len() - 1], rpc::ExistKey::reply_hash()).unwrap_err();
    assert!(matches!(short, Malformed::Truncated { .. }), "{short}");
    let mut flipped = body.clone();
    *flipped.last_mut().unwrap() = 9;
    let wrong = decode::<Expected<bool>>(&flipped, rpc::ExistKey::reply_hash()).unwrap_err();
    assert!(matches!(wrong, Malformed::Value { what: "bool", value: 9, .. }), "{wrong}");
}

#[test]
fn arguments_are_nothing_one_value_or_a_struct() {
    assert_eq!(rpc::ServiceReady::request_hash(), None);
    assert_eq!(encode(&NoArguments, 0, &Form::default()).len(), 4, "only the hash, which is not sent then");
    assert_eq!(rpc::Ping::request_hash(), Some(0x3c6d_83e0));
    assert_eq!(rpc::ExistKey::request_hash(), Some(0x7cf9_1ed8));
    assert_eq!(rpc::ExistKey::id(), 0x8938_5f09);
}

/// Bytes of a reply as the master might send them: a recorded one with some bytes changed, cut or repeated.
fn damaged(seed: &[u8], recorded: &[Vec<u8>]) -> Vec<u8> {
    let Some((first, rest)) = seed.split_first() else { return Vec::new() };
    let mut bytes = recorded[usize::from(*first) % recorded.len()].clone();
    for change in rest.chunks_exact(3) {
        let at = usize::from(u16::from_le_bytes([change[0], change[1]])) % bytes.len().max(1);
        match change[2] % 4 {
            0 if !bytes.is_empty() => bytes[at] ^= change[2] >> 2 | 1,
            1 => bytes.truncate(at),
            2 => bytes.insert(at, change[2]),
            _ => bytes.extend_from_within(at..),
        }
    }
    bytes
}

#[test]
fn no_reply_makes_the_reader_fail_otherwise_than_with_an_error() {
    let recorded: Vec<Vec<u8>> = exchanges("rpc")
        .iter()
        .map(|name| std::fs::read(folder("rpc").join(format!("{name}.resp.bin"))).unwrap())
        .collect();
    bolero::check!().with_type::<Vec<u8>>().for_each(|seed: &Vec<u8>| {
        for bytes in [damaged(seed, &recorded), seed.clone()] {
            let Some((header, body)) = bytes.split_first_chunk::<REPLY_HEADER>() else { continue };
            let _ = Reply::from_bytes(header);
            let _ = frame::refusal_text(body);
            macro_rules! each {
                ($name:ident) => {
                    // The type hash of a damaged reply is put right, so that what follows it is read.
                    let mut body = body.to_vec();
                    let odd = body.first().copied().unwrap_or_default() & 1;
                    if let Some(place) = body.first_chunk_mut::<4>() {
                        *place = (rpc::$name::reply_hash() | u32::from(odd)).to_le_bytes();
                    }
                    if let Ok((value, form)) = decode::<<rpc::$name as Rpc>::Reply>(&body, rpc::$name::reply_hash()) {
                        let again = encode(&value, rpc::$name::reply_hash(), &form);
                        let (read, _) = decode::<<rpc::$name as Rpc>::Reply>(&again, rpc::$name::reply_hash()).unwrap();
                        assert_eq!(read, value);
                    }
                };
            }
            rpc::for_each_rpc!(each);
        }
    });
}
