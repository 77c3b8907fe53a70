"""The course that `nbgrader` finds when it is run in this folder (see README.md)."""

c = get_config()  # noqa: F821  (nbgrader gives this file a get_config)

c.CourseDirectory.course_id = "minivllm"

# A test cell that a student deleted, by accident or not, is put back and graded.
c.OverwriteCells.add_missing_cells = True

# One cell may not run longer than this; every check of the course takes far less.
c.Execute.timeout = 60
