//! The display while a run lasts.

use super::{
    board::{Arm, Board},
    explain::seconds,
    figures::Sofar,
    play::Play,
    report::percent,
};
use crate::term::{Line, Tone};
use std::time::Duration;

/// The longest bar.
const BAR: usize = 30;
/// From so many columns on there is room for words.
const WIDE: usize = 76;

/// How far a run is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Progress<'a> {
    /// Which.
    pub(super) play: &'a Play,
    /// The share that is over.
    pub(super) share: f64,
    /// Of our time, until everything is over.
    pub(super) left: Duration,
}

// === impl Progress ===

impl Progress<'_> {
    /// For a terminal of so many columns.
    pub(super) fn lines(&self, board: &Board, width: usize) -> Vec<Line> {
        let mut lines = vec![self.bar(width)];
        lines.extend(Arm::ALL.map(|arm| row(arm, &Sofar::of(&board.samples(arm)), width)));
        lines
    }

    /// For a file or a pipe.
    pub(super) fn plain(&self, board: &Board) -> Line {
        let mut text = format!("{} {:3.0} %", self.play.workload.name(), 100.0 * self.share);
        for arm in Arm::ALL {
            let s = Sofar::of(&board.samples(arm));
            text += &format!(
                "; {}: median TTFT {} of {}, hits {}",
                arm.name(),
                seconds(s.median),
                s.answered,
                percent(s.hit_share)
            );
        }
        text.into()
    }

    fn bar(&self, width: usize) -> Line {
        let name = format!("{:<9} ", self.play.workload.name());
        let left = self.left.as_secs();
        let end = format!(
            " {:3.0} %  {}:{:02} left",
            100.0 * self.share,
            left / 60,
            left % 60
        );
        let taken = name.chars().count() + end.chars().count();
        let room = width.saturating_sub(taken + 1).min(BAR);
        let full = ((self.share.clamp(0.0, 1.0) * room as f64) as usize).min(room);
        Line::new(Tone::Strong, name)
            .then(Tone::Good, "#".repeat(full))
            .then(Tone::Faint, "-".repeat(room - full))
            .then(Tone::Plain, end)
    }
}

fn row(arm: Arm, s: &Sofar, width: usize) -> Line {
    let tone = match arm {
        Arm::Forebay => Tone::Good,
        Arm::Service => Tone::Plain,
    };
    let (median, hits) = (seconds(s.median), percent(s.hit_share));
    let text = if width < WIDE {
        format!("{median:>7}  hits {hits:>5} {:>4}/{}", s.answered, s.sent)
    } else {
        format!(
            "median TTFT {median:>7}   hit share {hits:>5}   {:>4} of {} answered",
            s.answered, s.sent
        )
    };
    Line::new(tone, format!("{:<9} ", arm.name())).then(Tone::Plain, text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::client::Usage;
    use forebay_sim::load::Workload;

    fn board() -> Board {
        let board = Board::default();
        for id in 0..120 {
            board.sent(Arm::Forebay, 0.0);
            board.note(Arm::Forebay, id, |s| {
                s.ttft = Some(0.35);
                s.usage = Some(Usage {
                    prompt: 100,
                    cached: 81,
                });
            });
        }
        board
    }

    #[test]
    fn fits_every_width() {
        let play = Play::new(Workload::Multiturn, 400.0, 1);
        for share in [0.0, 0.41, 1.0, 1.2] {
            let progress = Progress {
                play: &play,
                share,
                left: Duration::from_secs(3599),
            };
            for width in [40, WIDE - 1, WIDE, 200] {
                for line in progress.lines(&board(), width) {
                    assert!(line.width() < width, "{width}: {}", line.render(false));
                }
            }
        }
    }

    #[test]
    fn says_how_things_stand() {
        let play = Play::new(Workload::Shared, 400.0, 1);
        let progress = Progress {
            play: &play,
            share: 0.5,
            left: Duration::from_secs(75),
        };
        let lines = progress.lines(&board(), 40);
        let lines: Vec<String> = lines.iter().map(|l| l.render(false)).collect();
        assert!(lines[0].starts_with("shared    ####"), "{lines:?}");
        assert!(lines[0].ends_with("50 %  1:15 left"), "{lines:?}");
        assert_eq!(lines[1], "forebay    0.35 s  hits  81 %  120/120");
        assert_eq!(lines[2], "random          -  hits     -    0/0");
        let plain = progress.plain(&board()).render(false);
        assert!(plain.starts_with("shared  50 %; forebay: median TTFT 0.35 s of 120, hits 81 %; random: median TTFT - of 0"), "{plain}");
    }
}
