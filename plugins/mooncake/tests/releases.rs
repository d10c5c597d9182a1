//! Masters of other releases: known by what they answered when they were recorded.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod common;

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;

use common::services::Port;
use common::*;
use kvdock_plugin_api::ErrorKind;
use kvdock_plugin_mooncake::wire::frame::{REPLY_HEADER, REQUEST_HEADER, Reply, Request};

/// Answers that a master of a release gave, by function and by type of the arguments.
struct Recorded(HashMap<(u32, Option<[u8; 4]>), Vec<u8>>);

impl Recorded {
    fn of(folder: &str, release: &str) -> Recorded {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/captures").join(folder);
        let mut answers = HashMap::new();
        for entry in std::fs::read_dir(&folder).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            let Some(stem) = name.strip_suffix(".req.bin").filter(|stem| stem.ends_with(release)) else { continue };
            let request = std::fs::read(folder.join(&name)).unwrap();
            let header = Request::from_bytes(request.first_chunk().unwrap()).unwrap();
            let reply = std::fs::read(folder.join(format!("{stem}.resp.bin"))).unwrap();
            answers.insert((header.function, hash(&request[REQUEST_HEADER..])), reply);
        }
        Recorded(answers)
    }

    /// Serves one connection as that master did: what it was asked with other types it refuses.
    fn serve(&self, stream: &mut TcpStream) {
        let refusal =
            std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/captures/rpc/112-ExistKey-h3.resp.bin"))
                .unwrap();
        let mut header = [0; REQUEST_HEADER];
        while stream.read_exact(&mut header).is_ok() {
            let request = Request::from_bytes(&header).unwrap();
            let mut body = vec![0; request.body as usize];
            stream.read_exact(&mut body).unwrap();
            let recorded = self.0.get(&(request.function, hash(&body))).unwrap_or(&refusal);
            let (old, answer) = recorded.split_first_chunk::<REPLY_HEADER>().unwrap();
            let reply = Reply { sequence: request.sequence, ..Reply::from_bytes(old).unwrap() };
            stream.write_all(&[&reply.to_bytes()[..], answer].concat()).unwrap();
        }
    }
}

fn hash(body: &[u8]) -> Option<[u8; 4]> {
    body.first_chunk::<4>().map(|head| [head[0] & !1, head[1], head[2], head[3]])
}

#[test]
fn i2579_a_master_of_an_older_release_is_refused_at_the_start_with_its_release_in_words() {
    for (release, words) in
        [("v0.3.10.post2", "0.3.11 or older"), ("v0.3.11.post1", "0.3.11 or older"), ("v0.3.12.post1", "is 0.3.12")]
    {
        let recorded = Recorded::of("other-versions", release);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        std::thread::scope(|scope| {
            scope.spawn(|| recorded.serve(&mut listener.accept().unwrap().0));
            let config = format!(r#"{{"master_server_address":"{address}","master_connections":1}}"#);
            let (_, store) = try_attach(&config, "m", &[&pool(4, 4096)]);
            let error = store.unwrap_err();
            assert_eq!((error.kind, error.retryable), (ErrorKind::Unavailable, false), "{release}: {error}");
            assert!(error.message.contains(words) && error.message.contains(&address), "{release}: {error}");
            assert!(error.message.contains("0.3.13"), "{release}: it says what would be right: {error}");
        });
    }
}

#[test]
fn i12740_a_master_that_is_not_there_is_an_error_at_the_start() {
    let nobody = Port::take();
    let address = format!("127.0.0.1:{}", nobody.number);
    let (_, store) = try_attach(&format!(r#"{{"master_server_address":"{address}"}}"#), "m", &[&pool(4, 4096)]);
    let error = store.unwrap_err();
    assert_eq!((error.kind, error.retryable), (ErrorKind::Unavailable, true), "{error}");
    assert!(error.message.contains(&address), "{error}");
}
