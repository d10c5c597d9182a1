use super::*;

fn slow() -> Rig {
    Setup { delay: Duration::from_millis(2), ..Setup::default() }.start()
}

#[test]
fn a_drain_lets_requests_finish_and_takes_no_more() {
    let rig = slow();
    let streams: Vec<RequestStream> =
        (0..3).map(|i| rig.submit(request(&format!("r{i}"), prompt(i, 10), 20))).collect();
    let report = block_on(rig.handle.drain(Duration::from_secs(20)));
    assert_eq!(report, DrainReport { finished: 3, aborted: 0, backups_flushed: true });
    for stream in streams {
        assert_eq!(stream.blocking_collect()[0].token_ids.len(), 20);
    }
    let refused = rig.handle.submit(request("late", prompt(1, 4), 1)).err();
    assert_eq!(refused, Some(SubmitError::ShuttingDown));
    drop(rig.engine);
    assert!(!rig.handle.is_alive());
}

#[test]
fn a_drain_aborts_what_is_not_done_in_time() {
    let rig = slow();
    let mut endless = rig.submit(request("endless", prompt(1, 10), 450));
    endless.blocking_next();
    let begun = Instant::now();
    let report = block_on(rig.handle.drain(Duration::from_millis(200)));
    assert!(begun.elapsed() < Duration::from_secs(2));
    assert_eq!((report.finished, report.aborted), (0, 1));
    let completion = endless.blocking_collect().remove(0);
    let FinishReason::Abort { kind, .. } = completion.reason else { panic!() };
    assert_eq!(kind, AbortKind::ShuttingDown);
}

#[test]
fn dropping_the_engine_ends_the_streams() {
    let rig = slow();
    let mut stream = rig.submit(request("a", prompt(1, 10), 450));
    stream.blocking_next();
    drop(rig.engine);
    let completion = stream.blocking_collect().remove(0);
    let FinishReason::Abort { kind, .. } = completion.reason else { panic!() };
    assert_eq!(kind, AbortKind::ShuttingDown);
    assert_eq!(block_on(rig.handle.check_integrity()), Err("the engine has stopped".into()));
}

#[test]
fn zero_settings_are_refused() {
    let pool = FakePool::new(PAGE, 8);
    let mailbox = Mailbox::new();
    let cache = CacheManager::new(CacheConfig::default(), pool.clone(), Arc::new(NoEvents), mailbox.waker()).unwrap();
    let config = EngineConfig { prefill_chunk: 0, ..EngineConfig::default() };
    let model = Arc::new(FakeModel::new(64));
    let error =
        Engine::start_with(config, model, fake::decoders(), ModelMemory::One(pool), cache, mailbox).err().unwrap();
    assert_eq!(error.to_string(), "engine.prefill_chunk is 0; it must be at least 1");
}
