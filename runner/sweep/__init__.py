"""`runner train --array`: the runs of one run file with several values, one after another here."""
