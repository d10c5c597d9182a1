//! The Mooncake plugin beside the official client, in one cluster of a real master on this machine, and beside a plain copy through a socket.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};
use kvdock_plugin_api::mock::{Instance, MockHost, MockPool, Options, Outcome, Part, PoolSpec, Query, identity, key};
use kvdock_tests::mooncake::{self, Master, Mode, Official};

use crate::Bench;
use crate::row::{Better, Goal, Report, Row};
use crate::sample::side_by_side;
use crate::store::load;

/// Objects of a call.
const BATCH: u64 = 32;
/// Sizes of an object, what the official client is to be beaten by, and how many times more rounds than elsewhere.
const SIZES: [(u64, &str, f64, usize); 3] =
    [(64 << 10, "64 KiB", 1.5, 16), (1 << 20, "1 MiB", 1.2, 4), (4 << 20, "4 MiB", 1.2, 2)];
/// Size of an object beside a plain copy, and what part of its rate is asked for.
const LARGE: (u64, &str, f64) = (4 << 20, "4 MiB", 0.8);
/// Keys of an exists call.
const KEYS: u64 = 128;
/// Bytes of an object that are the host's seal.
const SEAL: u64 = 512;
/// Exists calls in one sample.
const CALLS: usize = 10;

/// Which way objects go.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Put,
    Get,
}

const WAYS: [(Way, &str); 2] = [(Way::Put, "put"), (Way::Get, "get")];

/// An instance of the plugin, and the pool that its objects come from and go to.
struct Client {
    store: Instance,
    pool: MockPool,
    // The instance talks to it to its end.
    _host: MockHost,
}

impl Client {
    fn attach(config: &str, model: &str, pages: u64, bytes: u64) -> Result<Client> {
        let library = kvdock_tests::paths::build().join("libkvdock_plugin_mooncake.so");
        let (table, host) = (load(&library)?, MockHost::new());
        // As the server has its pages: keys, values, and a seal.
        let half = (bytes - SEAL) / 2;
        let pool = MockPool::new(PoolSpec::bytes(0, "kv", pages, &[half, bytes - SEAL - half]).with_seal(SEAL));
        let store = host.attach(table, config, &identity(model), &[&pool]).map_err(|error| anyhow!("{error}"))?;
        (0..pages).for_each(|page| pool.fill(page as u32, page));
        Ok(Client { store, pool, _host: host })
    }

    fn part(&self, count: u64) -> Part {
        let keys: Vec<_> = (0..count).map(key).collect();
        let pages: Vec<u32> = (0..count as u32).collect();
        Part::new(&self.pool, &keys, &pages)
    }

    fn put(&self, count: u64) -> Result<()> {
        done("put", &self.store.set(&Options::default(), &[self.part(count)]))
    }

    fn remove(&self, count: u64) -> Result<()> {
        done("removal", &self.store.remove(&Options::default(), &[self.part(count)]))
    }

    /// Bytes a second, in units of 10^9, of one call.
    fn rate(&self, way: Way, bytes: u64) -> Result<f64> {
        let part = [self.part(BATCH)];
        let begin = Instant::now();
        let outcome = match way {
            Way::Put => self.store.set(&Options::default(), &part),
            Way::Get => self.store.get(&Options::default(), &part),
        };
        let time = begin.elapsed().as_secs_f64();
        done("call", &outcome)?;
        if way == Way::Put {
            self.remove(BATCH)?;
        }
        Ok(rate(bytes, time))
    }
}

fn done(what: &str, outcome: &Outcome) -> Result<()> {
    ensure!(outcome.all_ok(), "a {what} went wrong: {outcome:?}");
    Ok(())
}

fn rate(bytes: u64, seconds: f64) -> f64 {
    (bytes * BATCH) as f64 / seconds / 1e9
}

/// Adds the rows.
///
/// # Errors
/// When the services can't be started, or a call goes wrong.
pub fn rows(bench: &Bench, report: &mut Report) -> Result<()> {
    let against = |way: &str, size: &str| {
        format!("mooncake, {way} of {BATCH} x {size} in an official segment (GB/s), peer the official client")
    };
    let exists = format!("mooncake, exists of {KEYS} keys (us), peer the official client");
    let plain = |way: &str, whose: &str| {
        format!("mooncake, {way} of {BATCH} x {} in {whose} (GB/s), peer a plain copy through a socket", LARGE.1)
    };
    let (own, other) = ("the own segment", "another kvdock's segment");
    let names: Vec<String> = WAYS
        .iter()
        .flat_map(|(_, way)| SIZES.iter().map(|size| against(way, size.1)).chain([plain(way, own), plain(way, other)]))
        .chain([exists.clone()])
        .collect();
    if !names.iter().any(|name| bench.wants(name)) {
        return Ok(());
    }
    if !mooncake::is_here() {
        let wanted = names.iter().filter(|name| bench.wants(name));
        return wanted.into_iter().try_for_each(|name| report.skip(name, "the real Mooncake services are not here"));
    }
    let master = Master::start(&["--default_kv_lease_ttl=10000"]);
    {
        let _holder = Official::start(&master, Mode::Peer, 2 << 30);
        let mut official = Official::start(&master, Mode::Peer, 0);
        for (bytes, size, goal, more) in SIZES {
            if !WAYS.iter().any(|(_, way)| bench.wants(&against(way, size))) {
                continue;
            }
            let client = Client::attach(&master.config(Mode::Peer, 0), size, BATCH, bytes)?;
            for (way, word) in WAYS {
                let name = against(word, size);
                if !bench.wants(&name) {
                    continue;
                }
                if way == Way::Get {
                    client.put(BATCH)?;
                }
                let theirs = |official: &mut Official| {
                    let (put, get) = official.time_batch(BATCH as usize, bytes as usize);
                    Ok(rate(bytes, if way == Way::Put { put } else { get }))
                };
                let turns =
                    side_by_side(bench.rounds.times(more), || client.rate(way, bytes), || theirs(&mut official))?;
                report.add(Row::new(name, turns, Better::More, Goal::Ratio(goal)))?;
            }
            client.remove(BATCH)?;
            client.store.close().map_err(|error| anyhow!("{error}"))?;
        }
        if bench.wants(&exists) {
            exists_row(bench, report, &master, &mut official, exists)?;
        }
    }
    // The official clients are gone; with them their memory, once the master has noticed.
    for (whose, in_own) in [(own, true), (other, false)] {
        if WAYS.iter().any(|(_, way)| bench.wants(&plain(way, whose))) {
            beside_a_plain_copy(bench, report, in_own, |way| plain(way, whose))?;
        }
    }
    Ok(())
}

fn exists_row(
    bench: &Bench,
    report: &mut Report,
    master: &Master,
    official: &mut Official,
    name: String,
) -> Result<()> {
    let client = Client::attach(&master.config(Mode::Peer, 0), "exists", KEYS, 4096)?;
    client.put(KEYS)?;
    let keys: Vec<_> = (0..KEYS).map(key).collect();
    // As long as ours are.
    let names: Vec<String> = (0..KEYS).map(|number| format!("kvdock/{:032x}/kv-00000000/{number:064x}", 0)).collect();
    let data: Vec<Vec<u8>> = (0..KEYS).map(|number| vec![number as u8; 4096]).collect();
    ensure!(official.batch_put(&names, &data).iter().all(|code| *code == 0), "the official client could not put");
    let ours = || {
        let begin = Instant::now();
        for _ in 0..CALLS {
            let found = client.store.exists(&Options::default(), &keys, &[Query::of(&client.pool)]);
            let found = found.map_err(|error| anyhow!("{error}"))?.longest();
            ensure!(found == KEYS as usize, "{found} of {KEYS} keys are there");
        }
        Ok(begin.elapsed().as_secs_f64() / CALLS as f64 * 1e6)
    };
    let peer = || Ok(official.time_exists(&names, CALLS) / CALLS as f64 * 1e6);
    let turns = side_by_side(bench.rounds.times(20), ours, peer)?;
    report.add(Row::new(name, turns, Better::Less, Goal::Ratio(1.0)))?;
    client.store.close().map_err(|error| anyhow!("{error}"))
}

/// Rows of a cluster of kvdock alone.
fn beside_a_plain_copy(bench: &Bench, report: &mut Report, own: bool, name: impl Fn(&str) -> String) -> Result<()> {
    let (bytes, _, goal) = LARGE;
    let master = Master::start(&["--default_kv_lease_ttl=10000"]);
    // Twice what is in it, so that a range that was just given back is not the only one.
    let config = |segment: bool| master.config(Mode::Peer, if segment { 2 * BATCH * bytes } else { 0 });
    let holder = if own { None } else { Some(Client::attach(&config(true), "holder", 1, 4096)?) };
    let client = Client::attach(&config(own), "large", BATCH, bytes)?;
    let mut copy = PlainCopy::new(BATCH as usize * bytes as usize)?;
    for (way, word) in WAYS {
        let name = name(word);
        if !bench.wants(&name) {
            continue;
        }
        if way == Way::Get {
            client.put(BATCH)?;
        }
        let peer = || Ok(rate(bytes, copy.run()?));
        let turns = side_by_side(bench.rounds.times(2), || client.rate(way, bytes), peer)?;
        report.add(Row::new(name, turns, Better::More, Goal::Ratio(goal)))?;
    }
    for client in holder.into_iter().chain([client]) {
        client.store.close().map_err(|error| anyhow!("{error}"))?;
    }
    Ok(())
}

/// Memory, and a thread that takes it through a socket into memory of its own.
struct PlainCopy {
    stream: TcpStream,
    data: Vec<u8>,
}

/// Bytes of one system call.
const PIECE: usize = 4 << 20;

impl PlainCopy {
    fn new(bytes: usize) -> Result<PlainCopy> {
        let listener = TcpListener::bind("127.0.0.1:0").context("there is no free port")?;
        let stream = TcpStream::connect(listener.local_addr()?).context("no connection to this process")?;
        let (mut sink, _) = listener.accept().context("no connection from this process")?;
        stream.set_nodelay(true)?;
        sink.set_nodelay(true)?;
        // It ends with the connection.
        std::thread::spawn(move || {
            let mut taken = vec![1u8; bytes];
            loop {
                for piece in taken.chunks_mut(PIECE) {
                    if sink.read_exact(piece).is_err() {
                        return;
                    }
                }
                if sink.write_all(&[1]).is_err() {
                    return;
                }
            }
        });
        Ok(PlainCopy { stream, data: vec![2; bytes] })
    }

    /// Seconds until all is there.
    fn run(&mut self) -> Result<f64> {
        let begin = Instant::now();
        for piece in self.data.chunks(PIECE) {
            self.stream.write_all(piece).context("the plain copy")?;
        }
        self.stream.read_exact(&mut [0]).context("the plain copy")?;
        Ok(begin.elapsed().as_secs_f64())
    }
}
