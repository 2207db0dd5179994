//! Ranks that end, and signals that arrive after all ranks have ended.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, Stdio};
use std::sync::Mutex;

use signal_hook::consts::{SIGINT, SIGTERM};

use super::*;

/// A sink that collects lines.
#[derive(Default)]
struct CollectedLines(Mutex<Vec<String>>);

impl OutputSink for CollectedLines {
    fn write_line(&self, _: usize, _: Stream, line: &[u8]) -> Result<(), Error> {
        self.0.lock().unwrap().push(String::from_utf8_lossy(line).into_owned());
        Ok(())
    }
}

#[test]
fn the_other_ranks_have_the_jobs_time_to_report_after_a_failure() {
    let runtime = Runtime::system();
    let (messages, _words) = runtime.mailbox();
    let (events, mut inbox) = runtime.mailbox();
    let heard = Arc::new(CollectedLines::default());
    let minute = Duration::from_secs(60);
    let rendezvous = Rendezvous::here(2, 0).unwrap();
    let mut watch =
        RunningJob::new(&runtime, &messages, 0, [minute, Duration::ZERO], rendezvous, &Started::default());
    let sink: Arc<dyn OutputSink> = heard.clone();
    for script in ["exit 7", "sleep 1; echo heard"] {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(Stdio::null()).process_group(0);
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        watch.add(child, &events, &sink).unwrap();
    }
    assert_eq!(watch.until_all_have_ended(&mut inbox).unwrap().outcome, Outcome::Code(7));
    assert_eq!(*heard.0.lock().unwrap(), ["heard\n"]);
}

#[test]
fn a_signal_after_the_end_of_all_ranks_is_reported_with_code_0() {
    let runtime = Runtime::system();
    let (messages, _words) = runtime.mailbox();
    let (events, mut inbox) = runtime.mailbox();
    let limits = [REPORT_GRACE, Duration::ZERO];
    let rendezvous = Rendezvous::here(1, 0).unwrap();
    let mut watch = RunningJob::new(&runtime, &messages, 0, limits, rendezvous, &Started::default());
    let mut command = Command::new("true");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let rank = command.spawn().unwrap();
    child::wait_for_end(rustix::process::Pid::from_child(&rank)).unwrap();
    events.send(Event::Signalled(SIGINT));
    watch.add(rank, &events, &(Arc::new(CollectedLines::default()) as Arc<dyn OutputSink>)).unwrap();
    let ended = watch.until_all_have_ended(&mut inbox).unwrap().outcome;
    assert_eq!(ended, Outcome::Stopped { code: 0, by: Stop::Signal(SIGINT) });
}

#[test]
fn a_signal_after_the_end_of_all_ranks_does_not_replace_the_code_of_a_failure() {
    let runtime = Runtime::system();
    let (messages, _words) = runtime.mailbox();
    let (events, mut inbox) = runtime.mailbox();
    let limits = [REPORT_GRACE, Duration::ZERO];
    let rendezvous = Rendezvous::here(2, 0).unwrap();
    let mut watch = RunningJob::new(&runtime, &messages, 0, limits, rendezvous, &Started::default());
    watch.failures = [1, 0].map(|rank| (rank, ExitStatus::from_raw(7 << 8))).to_vec();
    watch.phase = Phase::Reporting(runtime.deadline(Duration::from_millis(100)));
    [SIGINT, SIGTERM].into_iter().for_each(|signal| events.send(Event::Signalled(signal)));
    watch.await_record(&mut inbox);
    watch.name_cause();
    assert_eq!((watch.stopped, watch.code), (Some(Stop::Signal(SIGINT)), Some(7)));
}

/// The process has left the group of its rank, and this process does not adopt it.
#[cfg(target_os = "linux")]
#[test]
fn the_end_of_the_job_does_not_wait_for_a_process_that_keeps_the_output_open() {
    let runtime = Runtime::system();
    let (messages, _words) = runtime.mailbox();
    let (events, mut inbox) = runtime.mailbox();
    let heard = Arc::new(CollectedLines::default());
    let limits = [REPORT_GRACE, Duration::ZERO];
    let rendezvous = Rendezvous::here(1, 0).unwrap();
    let mut watch = RunningJob::new(&runtime, &messages, 0, limits, rendezvous, &Started::default());
    let mut command = Command::new("sh");
    command.args(["-c", "echo $(setsid -f sh -c 'echo $$; exec >&2; exec sleep 60')"]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    watch.add(command.spawn().unwrap(), &events, &(heard.clone() as Arc<dyn OutputSink>)).unwrap();
    assert_eq!(watch.until_all_have_ended(&mut inbox).unwrap().outcome, Outcome::Success);
    let stray: i32 = heard.0.lock().unwrap()[0].trim_end().parse().unwrap();
    let stray = rustix::process::Pid::from_raw(stray).unwrap();
    rustix::process::kill_process(stray, Signal::KILL).expect("it is still there");
}
